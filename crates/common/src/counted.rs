//! Writes a number with its noun, for messages.

pub fn counted(count: usize, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_is_singular() {
        let said = [0, 1, 2, 11].map(|count| counted(count, "client"));
        assert_eq!(said, ["0 clients", "1 client", "2 clients", "11 clients"]);
    }
}
