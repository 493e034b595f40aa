//! What `sepal top` shows, and what keys do to it. Pure: it knows neither terminal nor socket.

use std::collections::VecDeque;
use std::fmt;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use supervisor::instance::LiveInstance;
use supervisor::report::{ChildReport, InstanceReport};

/// Rates of steps that are kept for the small graph.
const HISTORY: usize = 60;

/// What came of a question: the instances with what they tell, or why there is nothing.
pub type Heard = Result<Vec<(LiveInstance, InstanceReport)>, String>;

/// What a person can ask of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperatorRequest {
    /// End the sessions and the workers of the instance, as `sepal pause` does.
    Drain,
    /// Finish running jobs of a worker, named GROUP.RANK, and start it again.
    RestartWorker(String),
}

impl fmt::Display for OperatorRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OperatorRequest::Drain => f.write_str("drain this instance until sepal resume"),
            OperatorRequest::RestartWorker(worker) => write!(f, "restart worker {worker}"),
        }
    }
}

/// What a key leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// The view may have changed, and nothing else.
    Nothing,
    /// The person has seen enough.
    Quit,
    /// The person has confirmed a request.
    Ask(LiveInstance, OperatorRequest),
}

/// The state of the view; nothing yet by default.
#[derive(Debug, Default)]
pub struct TopState {
    instances: Vec<(LiveInstance, InstanceReport)>,
    /// The instance that is shown.
    current: usize,
    /// The process that is chosen.
    selected: usize,
    /// Sessions that are above the first shown one.
    scrolled: usize,
    /// Whether the keys are explained.
    is_helping: bool,
    /// A request that waits to be confirmed.
    asked: Option<OperatorRequest>,
    /// What the person should know, until the next key.
    notice: Option<String>,
    /// Why there is no report now.
    failure: Option<String>,
    /// Steps per second of the shown instance, the latest last.
    history: VecDeque<f64>,
}

impl TopState {
    /// Takes what came of a question. What was shown stays while there is no answer.
    pub fn hear(&mut self, heard: Heard) {
        match heard {
            Ok(instances) => {
                let name = self.instance().map(|(live, _)| live.name.clone());
                let same = instances.iter().position(|(live, _)| Some(&live.name) == name.as_ref());
                if same.is_none() {
                    self.leave();
                }
                self.current = same.unwrap_or(0);
                self.instances = instances;
                self.failure = None;
                self.note_rate();
            }
            Err(why) => self.failure = Some(why),
        }
        self.keep_within();
    }

    /// What came of a request.
    pub fn answered(&mut self, answer: Result<String, String>) {
        self.notice = Some(answer.unwrap_or_else(|why| format!("not done: {why}")));
    }

    /// A key was pressed.
    pub fn key(&mut self, key: KeyEvent) -> KeyOutcome {
        if key.kind == KeyEventKind::Release {
            return KeyOutcome::Nothing;
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return KeyOutcome::Quit;
        }
        self.notice = None;
        if let Some(request) = self.asked.take() {
            return self.confirm(key.code, request);
        }
        if self.is_helping {
            self.is_helping = false;
            return KeyOutcome::Nothing;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return KeyOutcome::Quit,
            KeyCode::Char('?' | 'h') => self.is_helping = true,
            KeyCode::Up => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down => self.selected += 1,
            KeyCode::PageUp => self.scrolled = self.scrolled.saturating_sub(5),
            KeyCode::PageDown => self.scrolled += 5,
            KeyCode::Left => self.show_other(self.instances.len().saturating_sub(1)),
            KeyCode::Right | KeyCode::Tab => self.show_other(1),
            KeyCode::Char('d') => self.asked = Some(OperatorRequest::Drain),
            KeyCode::Char('r') => self.ask_restart(),
            _ => {}
        }
        self.keep_within();
        KeyOutcome::Nothing
    }

    fn confirm(&mut self, code: KeyCode, request: OperatorRequest) -> KeyOutcome {
        match (code, self.instance()) {
            (KeyCode::Char('y'), Some((live, _))) => KeyOutcome::Ask(live.clone(), request),
            _ => {
                self.notice = Some("nothing was done".to_owned());
                KeyOutcome::Nothing
            }
        }
    }

    fn ask_restart(&mut self) {
        let worker = self.process().and_then(|child| child.worker.clone());
        match worker {
            Some(worker) => self.asked = Some(OperatorRequest::RestartWorker(worker)),
            None => self.notice = Some("choose a worker with the arrow keys first".to_owned()),
        }
    }

    /// Shows another instance.
    fn show_other(&mut self, by: usize) {
        if self.instances.len() > 1 {
            self.current = (self.current + by) % self.instances.len();
            self.leave();
        }
    }

    /// Forgets what belongs to the instance that was shown.
    fn leave(&mut self) {
        (self.selected, self.scrolled) = (0, 0);
        self.asked = None;
        self.history.clear();
    }

    /// Choices that do not exist any more become the last that do.
    fn keep_within(&mut self) {
        let (processes, sessions) = self
            .instance()
            .map_or((0, 0), |(_, report)| (report.children.len(), report.figures.sessions.len()));
        self.selected = self.selected.min(processes.saturating_sub(1));
        self.scrolled = self.scrolled.min(sessions.saturating_sub(1));
    }

    /// Notes the rate of steps for the small graph.
    fn note_rate(&mut self) {
        let Some((_, report)) = self.instance() else { return };
        let rate = report.figures.minute.steps_per_s;
        self.history.push_back(rate);
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }

    /// The instance that is shown.
    pub fn instance(&self) -> Option<&(LiveInstance, InstanceReport)> {
        self.instances.get(self.current)
    }

    /// The process that is chosen.
    pub fn process(&self) -> Option<&ChildReport> {
        self.instance().and_then(|(_, report)| report.children.get(self.selected))
    }

    /// Which of how many instances is shown, counted from 1.
    pub fn position(&self) -> (usize, usize) {
        (self.current + 1, self.instances.len())
    }

    /// Index of the process that is chosen.
    pub fn selected(&self) -> usize {
        self.selected
    }

    /// Sessions above the first shown one.
    pub fn scrolled(&self) -> usize {
        self.scrolled
    }

    /// Whether the keys are explained.
    pub fn is_helping(&self) -> bool {
        self.is_helping
    }

    /// The request that waits to be confirmed.
    pub fn asked(&self) -> Option<&OperatorRequest> {
        self.asked.as_ref()
    }

    /// What the person should know.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref().or(self.failure.as_deref())
    }

    /// Steps per second, the latest last.
    pub fn history(&self) -> impl Iterator<Item = f64> {
        self.history.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use shared::figures::SessionFigures;

    use super::*;

    fn instance(name: &str) -> (LiveInstance, InstanceReport) {
        let child = |role: &str, worker: Option<&str>| ChildReport {
            role: role.to_owned(),
            worker: worker.map(str::to_owned),
            ..ChildReport::default()
        };
        let mut report = InstanceReport {
            children: vec![child("netd", None), child("gpu-worker", Some("0.0"))],
            ..InstanceReport::default()
        };
        report.figures.sessions = vec![SessionFigures::default(); 12];
        (LiveInstance { name: name.to_owned(), status_socket: PathBuf::from(name) }, report)
    }

    fn view() -> TopState {
        let mut view = TopState::default();
        view.hear(Ok(vec![instance("a"), instance("b")]));
        view
    }

    fn press(view: &mut TopState, code: KeyCode) -> KeyOutcome {
        view.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn arrows_stay_within_what_there_is() {
        let mut view = view();
        assert_eq!(press(&mut view, KeyCode::Up), KeyOutcome::Nothing);
        assert_eq!(view.selected(), 0);
        (0..5).for_each(|_| drop(press(&mut view, KeyCode::Down)));
        assert_eq!(view.process().unwrap().role, "gpu-worker");
        (0..5).for_each(|_| drop(press(&mut view, KeyCode::PageDown)));
        assert_eq!(view.scrolled(), 11);
        press(&mut view, KeyCode::PageUp);
        assert_eq!(view.scrolled(), 6);
        press(&mut view, KeyCode::Right);
        assert_eq!((view.position(), view.selected(), view.scrolled()), ((2, 2), 0, 0));
        press(&mut view, KeyCode::Left);
        assert_eq!(view.position(), (1, 2));
        // The instance that is shown has ended: another takes its place.
        view.hear(Ok(vec![instance("b")]));
        assert_eq!((view.position(), view.instance().unwrap().0.name.as_str()), ((1, 1), "b"));
        view.hear(Ok(Vec::new()));
        assert!(view.process().is_none());
        assert_eq!(press(&mut view, KeyCode::Down), KeyOutcome::Nothing);
    }

    #[test]
    fn nothing_is_asked_of_an_instance_before_it_is_confirmed() {
        let mut view = view();
        press(&mut view, KeyCode::Char('r'));
        assert!(view.asked().is_none() && view.notice().unwrap().contains("choose a worker"));
        press(&mut view, KeyCode::Down);
        press(&mut view, KeyCode::Char('r'));
        let restart = OperatorRequest::RestartWorker("0.0".to_owned());
        assert_eq!(view.asked(), Some(&restart));
        assert_eq!(press(&mut view, KeyCode::Char('n')), KeyOutcome::Nothing);
        assert_eq!((view.asked(), view.notice()), (None, Some("nothing was done")));
        press(&mut view, KeyCode::Char('r'));
        let confirmed = press(&mut view, KeyCode::Char('y'));
        assert_eq!(confirmed, KeyOutcome::Ask(instance("a").0, restart));
        view.answered(Err("it is loading".to_owned()));
        assert_eq!(view.notice(), Some("not done: it is loading"));
        press(&mut view, KeyCode::Char('d'));
        assert_eq!(view.asked(), Some(&OperatorRequest::Drain));
        // What was asked was of that instance.
        view.hear(Ok(vec![instance("b")]));
        assert_eq!(view.asked(), None);
    }

    #[test]
    fn q_and_ctrl_c_quit_also_while_something_is_asked() {
        let mut view = view();
        assert_eq!(press(&mut view, KeyCode::Char('q')), KeyOutcome::Quit);
        press(&mut view, KeyCode::Char('?'));
        assert!(view.is_helping());
        assert_eq!(press(&mut view, KeyCode::Char('q')), KeyOutcome::Nothing);
        press(&mut view, KeyCode::Char('d'));
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(view.key(control_c), KeyOutcome::Quit);
    }

    #[test]
    fn what_was_shown_stays_while_a_supervisor_is_silent() {
        let mut view = view();
        view.hear(Err("the supervisor of instance a does not answer".to_owned()));
        assert_eq!(view.notice(), Some("the supervisor of instance a does not answer"));
        assert_eq!(view.instance().unwrap().0.name, "a");
        view.hear(Ok(vec![instance("a")]));
        assert_eq!(view.notice(), None);
        assert_eq!(view.history().count(), 2);
    }
}
