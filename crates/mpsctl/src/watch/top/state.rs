//! The selection and the question on the screen, and the action for each key.

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::model::Model;
use crate::show::columns::{Column, TOP_CLIENTS as CLIENTS, TOP_SLICES as SLICES};
use crate::show::table::Shown;
use common::bus::answers::given;
use common::bus::proxy::{BusError, Listed};
use common::bus::rows::{Client, Device};

/// The table to which keys apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Focus {
    #[default]
    Slices,
    Clients,
}

/// Identifies a row in the table of clients: a process has one row for each of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientId {
    pid: u32,
    gpu: String,
}

impl ClientId {
    fn new(client: &Client) -> Self {
        Self { pid: client.pid, gpu: client.gpu.clone() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Sort {
    pub(super) column: usize,
    pub(super) reversed: bool,
}

impl Sort {
    fn sorted<'r, R>(
        self,
        columns: &[Column<R>],
        rows: impl Iterator<Item = &'r Listed<R>>,
    ) -> Vec<&'r Listed<R>> {
        let mut rows: Vec<&Listed<R>> = rows.collect();
        if let Some(column) = columns.get(self.column) {
            rows.sort_by(|a, b| (column.order)(a, b));
        }
        if self.reversed {
            rows.reverse();
        }
        rows
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Draw,
    Quit,
    /// Suspend this program, as Ctrl-Z does in other programs.
    Stop,
    /// End the GPU work of the process with this PID.
    End(u32),
}

#[derive(Debug, Default)]
pub(super) struct TopState {
    pub(super) focus: Focus,
    /// The name of the selected slice. None if the row `all` is selected.
    pub(super) slice: Option<String>,
    pub(super) client: Option<ClientId>,
    pub(super) sort_slices: Sort,
    pub(super) sort_clients: Sort,
    /// The question on the screen: the client that would lose its GPU work, and the text. None if the screen has no question.
    pub(super) question: Option<(ClientId, String)>,
    pub(super) ending: Option<u32>,
    pub(super) message: Option<String>,
    pub(super) help: bool,
}

impl TopState {
    pub(super) fn slices<'m>(&self, model: &'m Model) -> Vec<&'m Listed<Device>> {
        self.sort_slices.sorted(SLICES, model.devices.iter())
    }

    pub(super) fn clients<'m>(&self, model: &'m Model) -> Vec<&'m Listed<Client>> {
        let is_shown = |client: &&Listed<Client>| {
            self.slice.as_ref().is_none_or(|slice| given(client).any(|one| one == slice))
        };
        self.sort_clients.sorted(CLIENTS, model.clients.iter().filter(is_shown))
    }

    /// The index of the selected row in the table of slices. Index 0 is the row `all`.
    pub(super) fn slice_place(&self, slices: &[&Listed<Device>]) -> usize {
        let place = self.slice.as_ref().and_then(|name| slices.iter().position(|slice| slice.addr == *name));
        place.map_or(0, |place| place + 1)
    }

    pub(super) fn client_place(&self, clients: &[&Listed<Client>]) -> Option<usize> {
        let selected = self.client.as_ref()?;
        clients.iter().position(|client| ClientId::new(client) == *selected)
    }

    /// Clears the selection and the question if their slice or their client no longer exists.
    pub(super) fn settle(&mut self, model: &Model) {
        if let Some(slice) = &self.slice
            && !model.devices.iter().any(|device| device.addr == *slice)
        {
            self.slice = None;
        }
        if let Some((client, _)) = &self.question
            && !model.clients.iter().any(|one| ClientId::new(one) == *client)
        {
            self.message = Some(format!("Process {} is no longer a client.", client.pid));
            self.question = None;
        }
        if self.client_place(&self.clients(model)).is_none() {
            self.client = None;
        }
    }

    pub(super) fn ended(&mut self, pid: u32, done: &Result<(), BusError>) {
        self.ending = None;
        self.message = Some(match done {
            Ok(()) => format!("Process {pid} uses no GPU any more."),
            Err(error) => format!("Process {pid}: {}", error.to_string().shown()),
        });
    }

    pub(super) fn key(&mut self, key: KeyEvent, model: &Model) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Draw;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Action::Quit,
                KeyCode::Char('z') => Action::Stop,
                _ => Action::Draw,
            };
        }
        if let Some((client, _)) = self.question.take() {
            return self.answered(client.pid, key.code);
        }
        self.message = None;
        if std::mem::take(&mut self.help) {
            return Action::Draw;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Action::Quit,
            KeyCode::Char('h' | '?') => self.help = true,
            KeyCode::Tab | KeyCode::BackTab => {
                self.focus = match self.focus {
                    Focus::Slices => Focus::Clients,
                    Focus::Clients => Focus::Slices,
                };
                if self.focus == Focus::Clients && self.client.is_none() {
                    self.select(model, |_, _| 0);
                }
            }
            KeyCode::Up | KeyCode::Char('k') => self.select(model, |place, _| place.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(model, |place, _| place.saturating_add(1)),
            KeyCode::PageUp => self.select(model, |place, _| place.saturating_sub(10)),
            KeyCode::PageDown => self.select(model, |place, _| place.saturating_add(10)),
            KeyCode::Home => self.select(model, |_, _| 0),
            KeyCode::End => self.select(model, |_, rows| rows),
            KeyCode::Char('s' | '>') => self.sort(|sort, columns| sort.column = (sort.column + 1) % columns),
            KeyCode::Char('<') => {
                self.sort(|sort, columns| sort.column = (sort.column + columns - 1) % columns);
            }
            KeyCode::Char('r') => self.sort(|sort, _| sort.reversed ^= true),
            KeyCode::Char('t' | 'K') => self.ask(model),
            _ => {}
        }
        Action::Draw
    }

    fn answered(&mut self, pid: u32, key: KeyCode) -> Action {
        if !matches!(key, KeyCode::Char('y' | 'Y')) {
            self.message = Some(format!("The GPU work of process {pid} was not ended."));
            return Action::Draw;
        }
        self.ending = Some(pid);
        Action::End(pid)
    }

    /// Changes the order of the table to which keys apply. `change` gets the present order and the number of columns.
    fn sort(&mut self, change: impl FnOnce(&mut Sort, usize)) {
        match self.focus {
            Focus::Slices => change(&mut self.sort_slices, SLICES.len()),
            Focus::Clients => change(&mut self.sort_clients, CLIENTS.len()),
        }
    }

    /// Selects another row of the table to which keys apply. `to` gets the indexes of the selected row and of the last row, and
    /// returns the index of the row to select.
    fn select(&mut self, model: &Model, to: impl Fn(usize, usize) -> usize) {
        match self.focus {
            Focus::Slices => {
                let slices = self.slices(model);
                let place = to(self.slice_place(&slices), slices.len()).min(slices.len());
                let slice = place.checked_sub(1).and_then(|place| slices.get(place));
                self.slice = slice.map(|slice| slice.addr.clone());
                self.settle(model);
            }
            Focus::Clients => {
                let clients = self.clients(model);
                let last = clients.len().saturating_sub(1);
                let place = self.client_place(&clients).map_or(0, |place| to(place, last).min(last));
                self.client = clients.get(place).map(|client| ClientId::new(client));
            }
        }
    }

    /// Asks the user to confirm the end of the GPU work of the selected client.
    fn ask(&mut self, model: &Model) {
        if let Some(pid) = self.ending {
            self.message = Some(format!("The GPU work of process {pid} is still being ended."));
            return;
        }
        let clients = self.clients(model);
        let selected = self.client_place(&clients).and_then(|place| clients.get(place));
        match selected.filter(|_| self.focus == Focus::Clients) {
            None => self.message = Some("Select a client first: Tab, then the arrows.".to_owned()),
            Some(client) => {
                let facts = [Some(client.command.shown()), client.user.as_ref().map(Shown::shown)];
                let facts = facts.into_iter().flatten().collect::<Vec<_>>().join(", ");
                let question = format!("End the GPU work of process {pid} ({facts})? y/N", pid = client.pid);
                self.question = Some((ClientId::new(client), question));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use common::bus::error::RequestError;
    use serde_json::json;

    use super::*;
    use crate::watch::top::tests::{client, model, press};

    fn pids(state: &TopState, model: &Model) -> Vec<u32> {
        state.clients(model).iter().map(|client| client.pid).collect()
    }

    #[test]
    fn a_selected_slice_shows_its_clients_alone() {
        let model = model();
        let mut state = TopState::default();
        assert_eq!(pids(&state, &model), [101, 102, 103]);
        press(&mut state, &model, "j");
        assert_eq!((state.slice.as_deref(), pids(&state, &model)), (Some("00:06.0-0"), vec![101]));
        press(&mut state, &model, "j");
        assert_eq!(pids(&state, &model), [101, 102]);
        press(&mut state, &model, "kkkk");
        assert_eq!(pids(&state, &model), [101, 102, 103]);
        press(&mut state, &model, "jjjjjjjj");
        assert_eq!(state.slice.as_deref(), Some("00:06.0-3"));
    }

    #[test]
    fn the_order_goes_by_each_column_and_back() {
        let model = model();
        let mut state = TopState { focus: Focus::Clients, ..TopState::default() };
        press(&mut state, &model, "sss");
        assert_eq!(CLIENTS[state.sort_clients.column].head.name, "MEMORY");
        assert_eq!(pids(&state, &model), [102, 101, 103]);
        press(&mut state, &model, "r");
        assert_eq!(pids(&state, &model), [103, 101, 102]);
        press(&mut state, &model, "<<<<");
        assert_eq!(CLIENTS[state.sort_clients.column].head.name, "COMMAND");
        press(&mut state, &model, ">r");
        assert_eq!(pids(&state, &model), [101, 102, 103]);
        assert_eq!(state.sort_slices, Sort::default());
    }

    #[test]
    fn a_client_is_ended_after_a_yes_alone() {
        let model = model();
        let mut state = TopState::default();
        assert_eq!(press(&mut state, &model, "t"), Action::Draw);
        assert!(state.question.is_none() && state.message.as_ref().unwrap().contains("Select a client"));
        press(&mut state, &model, "\tj");
        for no in ["n", "q", "\u{1b}", "\n", "t"] {
            press(&mut state, &model, "K");
            let question = &state.question.as_ref().unwrap().1;
            assert_eq!(question, "End the GPU work of process 102 (train\u{fffd}, worker)? y/N");
            assert_eq!(press(&mut state, &model, no), Action::Draw, "{no:?}");
            assert!(state.question.is_none() && state.ending.is_none());
        }
        press(&mut state, &model, "t");
        assert_eq!(press(&mut state, &model, "y"), Action::End(102));
        press(&mut state, &model, "t");
        assert!(state.question.is_none() && state.message.as_ref().unwrap().contains("still being ended"));
        let refused = BusError::Refused(RequestError::AccessDenied("only root may\u{1b}".to_owned()));
        state.ended(102, &Err(refused));
        assert_eq!(state.message.as_deref(), Some("Process 102: only root may\u{fffd}"));
        assert_eq!(press(&mut state, &model, "q"), Action::Quit);
    }

    #[test]
    fn what_has_gone_is_neither_selected_nor_asked_about() {
        let mut model = model();
        let mut state = TopState::default();
        press(&mut state, &model, "jj\tjt");
        assert!(state.slice.is_some() && state.client.is_some() && state.question.is_some());
        model.list(Ok(vec![client(&json!({"pid": 101, "gpu": "GPU-1"}))]));
        model.devices.clear();
        state.settle(&model);
        assert!(state.slice.is_none() && state.client.is_none() && state.question.is_none());
        assert_eq!(state.message.as_deref(), Some("Process 102 is no longer a client."));
    }

    #[test]
    fn control_keys_work_at_any_time() {
        let model = model();
        let mut state = TopState { help: true, ..TopState::default() };
        assert_eq!(press(&mut state, &model, "\u{3}"), Action::Quit);
        assert_eq!(press(&mut state, &model, "\u{1a}"), Action::Stop);
        // While the help is shown, any key but Ctrl-C and Ctrl-Z only closes the help.
        assert_eq!(press(&mut state, &model, "q"), Action::Draw);
        assert_eq!(press(&mut state, &model, "q"), Action::Quit);
    }
}
