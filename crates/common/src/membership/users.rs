//! Finds the names of the host's users in /etc/passwd.

use std::fs;

/// The file with the host's users. A directory service (LDAP) is not asked for names, since it can take long to answer.
const USERS: &str = "/etc/passwd";

pub(super) fn all() -> String {
    String::from_utf8_lossy(&fs::read(USERS).unwrap_or_default()).into_owned()
}

pub(super) fn name_in(users: &str, uid: u32) -> String {
    let number = uid.to_string();
    let named = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == number && !name.is_empty()).then(|| name.to_owned())
    });
    named.unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names_or_numbers() {
        let users = "root:x:0:0:root:/root:/bin/bash\nbad line\nworker:x:1000:1000::/:/bin/sh\n:x:7:7::/:\n";
        for (uid, name) in [(0, "root"), (1000, "worker"), (100, "100"), (7, "7")] {
            assert_eq!(name_in(users, uid), name);
        }
    }
}
