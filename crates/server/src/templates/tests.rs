//! Builds and imports on engine, homes and guests that exist only in memory, with a real store.

use std::sync::Arc;
use std::time::Duration;

use dorm_engine::Id;
use dorm_engine::fake::{FakeEngine, FakeHomes};
use dorm_engine::{Homes as _, Limits};
use tokio::sync::mpsc;

use super::{Parts, TemplateError, Templates};
use crate::api::types::{BuildTemplate, ErrorBody, Progress, Recipe, RecipeFile, Template};
use crate::build_slots::BuildSlots;
use crate::config::{Config, NetworkRange, OnShutdown};
use crate::guest_client::fake::FakeGuests;
use crate::isolation::Choice;
use crate::records::Workspace;
use crate::store::{SqliteStore, Store};

mod builds;
mod imports;
mod recipes;

struct World {
    dir: tempfile::TempDir,
    engine: Arc<FakeEngine>,
    homes: Arc<FakeHomes>,
    guests: FakeGuests,
    templates: Arc<Templates>,
}

impl World {
    async fn new() -> Self {
        Self::with(|_| {}, |_| Some((String::new(), 0))).await
    }

    /// `answer` says what a run prints and its exit code; `None` lets it run on.
    async fn with(
        configure: impl FnOnce(&mut Config),
        answer: impl Fn(&str) -> Option<(String, i32)> + Send + Sync + 'static,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config {
            data: dir.path().to_owned(),
            listen: "127.0.0.1:0".parse().unwrap(),
            tls: None,
            domain: None,
            isolation: Choice::Container,
            defaults: Limits {
                cpu_millis: 1000,
                memory: 1 << 30,
                pids: 100,
                disk: 1 << 30,
                io_bps: None,
            },
            first_uid: 1_000_000,
            max_slots: 100,
            network_range: NetworkRange {
                base: "10.99.0.0".parse().unwrap(),
                prefix: 16,
            },
            nameservers: vec!["169.254.1.1".into()],
            on_shutdown: OnShutdown::Leave,
            stop_grace: Duration::from_secs(1),
            template_cache: None,
            host_ca: None,
            standby: Default::default(),
            max_body: 1 << 20,
        };
        configure(&mut config);
        let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&dir.path().join("dorm.db")).await.unwrap());
        let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
        let guests = FakeGuests::answering(&engine, answer);
        let templates = Templates::new(Parts {
            build_slots: BuildSlots::new(config.slots()),
            config: Arc::new(config),
            store,
            engine: engine.clone(),
            homes: homes.clone(),
        });
        Self {
            dir,
            engine,
            homes,
            guests,
            templates,
        }
    }

    async fn start(&self, name: &str, recipe: Recipe) -> Result<mpsc::Receiver<Progress>, TemplateError> {
        self.templates
            .build(&workspace(), name, BuildTemplate { recipe, force: false })
            .await
    }

    async fn build(&self, name: &str, recipe: Recipe) -> (Template, bool) {
        finished(self.start(name, recipe).await.unwrap())
            .await
            .expect("the template is made")
    }

    async fn fail(&self, name: &str, recipe: Recipe) -> ErrorBody {
        finished(self.start(name, recipe).await.unwrap())
            .await
            .expect_err("the template is not made")
    }

    /// Nothing is left of a build: no home, no box, no template but those named.
    async fn assert_clean(&self, templates: &[&Id]) {
        use dorm_engine::Engine as _;
        assert_eq!(self.homes.count(), 0);
        assert_eq!(self.engine.present().await.unwrap(), Vec::<Id>::new());
        let mut found = self.homes.templates().await.unwrap();
        let mut expected: Vec<Id> = templates.iter().map(|id| (*id).clone()).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }
}

fn workspace() -> Workspace {
    Workspace::default()
}

fn debian() -> Recipe {
    Recipe {
        from: "debian:bookworm".into(),
        apt: vec!["bash".into(), "git".into()],
        ..Recipe::default()
    }
}

fn file(path: &str, content: &str) -> RecipeFile {
    RecipeFile {
        path: path.into(),
        content: content.into(),
        ..RecipeFile::default()
    }
}

async fn collect(mut progress: mpsc::Receiver<Progress>) -> Vec<Progress> {
    let mut all = Vec::new();
    while let Some(one) = progress.recv().await {
        all.push(one);
    }
    all
}

async fn finished(progress: mpsc::Receiver<Progress>) -> Result<(Template, bool), ErrorBody> {
    match collect(progress).await.pop() {
        Some(Progress::Done { template, cached }) => Ok((template, cached)),
        Some(Progress::Error { error }) => Err(error),
        other => panic!("the progress ends with {other:?}"),
    }
}

fn titles(progress: &[Progress]) -> Vec<String> {
    let title = |p: &Progress| match p {
        Progress::Step { step, steps, title } => Some(format!("{step}/{steps} {title}")),
        _ => None,
    };
    progress.iter().filter_map(title).collect()
}
