//! The lifecycle on engines, homes and records that exist only in memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dorm_engine::fake::{FakeEngine, FakeHomes};
use dorm_engine::{Id, Isolation, Limits};
use tempfile::TempDir;

use super::{Agent, Creation, Parts, Published, Registry, Trouble, lag};
use crate::config::OnShutdown;
use crate::faults::Faults;
use crate::metrics::Metrics;
use crate::records::{
    AgentSpec, Lifetime, Reach, Sleep, Slots, SnapshotKind, State, TemplateDefaults, TemplateRecord,
    Workspace, now,
};
use crate::store::Store as _;
use crate::store::memory::MemoryStore;

mod again;
mod convert;
mod crash;
mod drive;
mod durable;
mod forks;
mod full;
mod go_on;
mod idle;
mod law;
mod model;
mod network;
mod restart;
mod sleep;
mod snapshots;
mod tangle;
mod told;

/// What outlives a daemon, and the daemon of the moment.
struct World {
    store: Arc<MemoryStore>,
    engine: Arc<FakeEngine>,
    homes: Arc<FakeHomes>,
    faults: Faults,
    registry: Arc<Registry>,
    /// Memory images.
    images: TempDir,
}

impl World {
    async fn new() -> Self {
        let store = Arc::new(MemoryStore::default());
        let (engine, homes) = (FakeEngine::new(), FakeHomes::new());
        let template = TemplateRecord {
            id: Id::random(),
            workspace: Workspace::default(),
            name: "base".to_owned(),
            built: Default::default(),
            recipe_hash: None,
            defaults: TemplateDefaults {
                env: [
                    ("A".to_owned(), "template".to_owned()),
                    ("B".to_owned(), "template".to_owned()),
                ]
                .into(),
                user: Some("user".to_owned()),
                start: Some("serve".to_owned()),
                workdir: None,
                ..TemplateDefaults::default()
            },
            size: 1,
            created: now(),
        };
        homes.add_template(&template.id);
        store.insert_template(&template).await.unwrap();
        let faults = Faults::armable();
        let images = tempfile::tempdir().unwrap();
        let registry = open(&store, &engine, &homes, &faults, images.path()).await;
        Self {
            store,
            engine,
            homes,
            faults,
            registry,
            images,
        }
    }

    /// The daemon dies without a word, and another takes its place.
    async fn restart(&mut self) {
        self.registry.shut_down(OnShutdown::Leave, Duration::ZERO).await;
        self.registry = open(
            &self.store,
            &self.engine,
            &self.homes,
            &self.faults,
            self.images.path(),
        )
        .await;
    }

    fn creation(name: &str, lifetime: Lifetime, start: bool) -> Creation {
        let limits = Limits {
            cpu_millis: 1000,
            memory: 1 << 30,
            pids: 100,
            disk: 1 << 30,
            io_bps: None,
        };
        let spec = AgentSpec {
            isolation: Isolation::default(),
            limits,
            env: [("B".to_owned(), "agent".to_owned())].into(),
            sleep: Sleep::default(),
            network: Default::default(),
            volumes: Vec::new(),
        };
        let workspace = Workspace::default();
        Creation {
            id: Id::random(),
            workspace,
            name: name.to_owned(),
            template: "base".to_owned(),
            lifetime,
            spec,
            reach: Reach::default(),
            start,
            sandbox: None,
        }
    }

    async fn create(&self, name: &str, lifetime: Lifetime, start: bool) -> Result<Arc<Agent>, Trouble> {
        self.registry.create(Self::creation(name, lifetime, start)).await
    }

    async fn running(&self, name: &str) -> Arc<Agent> {
        self.create(name, Lifetime::Persistent, true).await.unwrap()
    }

    async fn stopped(&self, name: &str) -> Arc<Agent> {
        self.create(name, Lifetime::Persistent, false).await.unwrap()
    }

    fn get(&self, name: &str) -> Option<Arc<Agent>> {
        self.registry.get(&Workspace::default(), name).ok()
    }

    /// Where the memory of an agent is that sleeps.
    fn image_of(&self, agent: &Agent) -> PathBuf {
        let image = agent.current_image().expect("its memory is on disk").id;
        let folder = self.images.path().join(agent.profile.id.as_str());
        folder.join(image.as_str())
    }

    /// As `agent/image`, without those that were set aside.
    fn images_on_disk(&self) -> Vec<String> {
        let list = |path: &Path| -> Vec<String> {
            let entries = std::fs::read_dir(path).into_iter().flatten();
            entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect()
        };
        let mut images = Vec::new();
        for agent in list(self.images.path()) {
            let of = list(&self.images.path().join(&agent));
            images.extend(of.iter().map(|image| format!("{agent}/{image}")));
        }
        images.retain(|image| !image.ends_with(".bad"));
        images.sort();
        images
    }

    /// Records, boxes, homes and images agree, and every event follows from the one before.
    async fn assert_in_order(&self) {
        for agent in self.registry.all() {
            lag::catch_up(&agent).await.unwrap();
        }
        let records = self.store.agents().await.unwrap().readable;
        let agents = self.registry.all();
        assert_eq!(records.len(), agents.len(), "{records:?}");
        assert_eq!(self.homes.count(), records.len());
        let mut images = Vec::new();
        for record in records {
            let id = &record.profile.id;
            let agent = self.get(id.as_str()).expect("a recorded agent is known");
            assert_eq!(agent.published().status, record.status);
            let state = record.status.state;
            let runs = matches!(state, State::Running | State::Standby);
            assert_eq!(self.engine.is_running(id), runs, "{record:?}");
            assert_eq!(self.engine.is_frozen(id), state == State::Standby, "{record:?}");
            assert_eq!(agent.image(), record.image);
            assert!(state != State::Hibernated || agent.current_image().is_some());
            images.extend(record.image.iter().map(|image| format!("{id}/{}", image.id)));
            assert_eq!(record.box_record.is_some(), runs, "{record:?}");
            assert_eq!(
                agent.published().current_box.as_deref(),
                record.box_record.as_ref()
            );
            let mut events = self.store.events(id, 1000).await.unwrap();
            events.reverse();
            assert!(
                events.windows(2).all(|pair| pair[1].from == Some(pair[0].to)),
                "{events:#?}"
            );
            assert_eq!(events.last().unwrap().to, record.status.state);
        }
        let snapshots = self.store.snapshots().await.unwrap();
        assert_eq!(self.homes.snapshot_count(), snapshots.len(), "{snapshots:?}");
        let full = snapshots
            .iter()
            .filter(|snapshot| snapshot.kind == SnapshotKind::Full);
        images.extend(full.map(|snapshot| format!("{}/{}", snapshot.agent, snapshot.id)));
        images.sort();
        // Those that were brought back go when there is time.
        for _ in 0..1000 {
            if self.images_on_disk() == images {
                break;
            }
            tokio::task::yield_now().await;
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.images_on_disk(), images);
    }
}

async fn open(
    store: &Arc<MemoryStore>,
    engine: &Arc<FakeEngine>,
    homes: &Arc<FakeHomes>,
    faults: &Faults,
    images: &Path,
) -> Arc<Registry> {
    let parts = Parts {
        store: store.clone(),
        engine: engine.clone(),
        homes: homes.clone(),
        metrics: Arc::new(Metrics::default()),
        faults: faults.clone(),
        slots: Slots {
            max: 100,
            first_uid: 1_000_000,
        },
        nameservers: vec!["169.254.1.1".to_owned()],
        stop_grace: Duration::from_secs(10),
        images: images.to_owned(),
    };
    Registry::open(parts, true).await.unwrap()
}

/// Waits until the agent rests in `state`.
async fn reaches(agent: &Arc<Agent>, state: State) {
    comes_to(agent, |now| now.status.state == state).await;
}

/// On a clock that is paused, what never happens is known at once.
async fn comes_to(agent: &Arc<Agent>, end: impl FnMut(&Published) -> bool) {
    let mut published = agent.subscribe();
    let waited = tokio::time::timeout(Duration::from_secs(24 * 3600), published.wait_for(end)).await;
    waited.expect("it never happens").unwrap();
}

/// Until times that are recorded from now on are other ones.
async fn later() {
    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
}

async fn vanishes(agent: &Arc<Agent>) {
    comes_to(agent, |now| now.gone).await;
}
