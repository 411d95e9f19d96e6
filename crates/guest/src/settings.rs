//! What holds for every run and request unless it says otherwise. Set at boot, changed by `POST /init`.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use dorm_proto::boot::BootConfig;

#[derive(Default)]
pub(crate) struct Settings {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    env: BTreeMap<String, String>,
    default_user: Option<String>,
    default_workdir: Option<String>,
}

fn given(text: Option<String>) -> Option<String> {
    text.filter(|t| !t.is_empty())
}

impl Settings {
    pub(crate) fn new(config: &BootConfig) -> Self {
        Self {
            state: Mutex::new(State {
                env: config.env.clone(),
                default_user: given(config.default_user.clone()),
                default_workdir: given(config.default_workdir.clone()),
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        self.state().env.clone()
    }

    pub(crate) fn add_env(&self, env: impl IntoIterator<Item = (String, String)>) {
        self.state().env.extend(env);
    }

    pub(crate) fn default_user(&self) -> String {
        self.state().default_user.clone().unwrap_or_else(|| "root".into())
    }

    pub(crate) fn default_workdir(&self) -> Option<String> {
        self.state().default_workdir.clone()
    }

    /// Sets what is given and leaves the rest.
    pub(crate) fn set_defaults(&self, user: Option<String>, workdir: Option<String>) {
        let mut state = self.state();
        state.default_user = given(user).or(state.default_user.take());
        state.default_workdir = given(workdir).or(state.default_workdir.take());
    }
}
