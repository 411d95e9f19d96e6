//! An agent as the rest of the server holds it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use dorm_engine::{BootConfig, BoxRecord, BoxSpec, Command, Isolation};
use dorm_proto::boot::{AGENT_ID_VARIABLE, PROTOCOL_VERSION};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;

use super::decide::{Request, Rest};
use super::idle::law::View;
use super::lag::Lag;
use super::links::Links;
use super::network::Network;
use super::registry::Context;
use super::{Trouble, driver, images, sleep};
use crate::records::{
    AgentRecord, BoxChange, Change, HoldRecord, ImageChange, ImageRecord, Note, Origin, Profile, Reach,
    State, Status, now,
};

/// How long a server may take to listen once its box is up.
const COMING_UP: Duration = Duration::from_secs(10);
/// The same, in emulation.
const COMING_UP_SLOWLY: Duration = Duration::from_secs(45);

pub struct Agent {
    pub profile: Profile,
    pub(super) ctx: Arc<Context>,
    published: watch::Sender<Published>,
    pub(super) inbox: Mutex<Inbox>,
    /// Rung when something comes into the inbox of an agent that is being driven.
    pub(super) bell: Notify,
    open: AtomicUsize,
    /// Connections to the guest.
    pub links: Links,
    /// And to ports of the box.
    pub port_links: Links,
    pub(super) lag: Lag,
    memory: Mutex<Memory>,
    pub(super) holds: Mutex<Vec<HoldRecord>>,
    pub(super) reach: RwLock<Arc<Reach>>,
    pub(super) network: Network,
    pub(super) sleep: sleep::Settings,
    /// When its box was last started from its files.
    started: Mutex<Option<Instant>>,
    /// See [`super::go_on`].
    pub(super) goes_on: AtomicBool,
    /// Nothing was seen of it since.
    quiet_since: Mutex<Instant>,
}

/// What is known of the agent's memory beyond its box.
#[derive(Default)]
struct Memory {
    image: Option<ImageRecord>,
    unsavable: Option<Unsavable>,
    setback: Option<Note>,
    work: Option<Note>,
    isolation: Isolation,
    /// A box of an earlier daemon's that could not be looked at. It may go on.
    unseen: Option<Box<BoxRecord>>,
}

/// An image could not be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unsavable {
    /// And would not be now, as long as it is as it is.
    AsItIs,
    /// And need not be tried earlier.
    Until(Instant),
}

/// What everyone may know of an agent at this moment.
#[derive(Debug, Clone)]
pub struct Published {
    pub status: Status,
    /// The box, from the moment it answers until nothing of it is left.
    pub current_box: Option<Arc<BoxRecord>>,
    /// Counts the boxes that this daemon saw of the agent.
    pub generation: u64,
    /// It is to be deleted when what is under way has ended.
    pub unwanted: bool,
    /// Somebody waits for it to run, who need not wait for all of what is under way.
    pub awaited: bool,
    pub gone: bool,
}

#[derive(Default)]
pub(super) struct Inbox {
    pub(super) asked: VecDeque<Asked>,
    pub(super) driven: bool,
}

pub(super) type Answer = Result<(), Trouble>;

pub(super) struct Asked {
    pub(super) request: Request,
    pub(super) reply: Option<oneshot::Sender<Answer>>,
}

impl Asked {
    /// Whether who asked has gone, or has what he wanted.
    pub(super) fn nobody_waits(&self) -> bool {
        self.reply.as_ref().is_some_and(oneshot::Sender::is_closed)
    }

    pub(super) fn answer(self, answer: Answer) {
        if let Some(reply) = self.reply {
            let _ = reply.send(answer);
        }
    }
}

impl Agent {
    pub(super) fn new(ctx: Arc<Context>, record: AgentRecord) -> Arc<Self> {
        let published = Published {
            status: record.status,
            current_box: None,
            generation: 0,
            unwanted: false,
            awaited: false,
            gone: false,
        };
        Arc::new(Self {
            network: Network::new(record.profile.spec.network.clone()),
            sleep: sleep::Settings::new(record.profile.spec.sleep),
            ctx,
            published: watch::Sender::new(published),
            inbox: Mutex::default(),
            bell: Notify::new(),
            open: AtomicUsize::new(0),
            goes_on: AtomicBool::new(record.goes_on),
            links: Links::default(),
            port_links: Links::default(),
            lag: Lag::default(),
            memory: Mutex::new(Memory {
                image: record.image,
                setback: record.setback,
                isolation: record.profile.spec.isolation,
                ..Memory::default()
            }),
            holds: Mutex::default(),
            reach: RwLock::new(Arc::new(record.reach)),
            started: Mutex::default(),
            quiet_since: Mutex::new(Instant::now()),
            profile: record.profile,
        })
    }

    pub fn state(&self) -> State {
        self.published.borrow().status.state
    }

    /// Where it rests. What is under way is the driver's to know.
    pub(super) fn rest(&self) -> Rest {
        Rest::of(self.state()).unwrap_or(Rest::Failed)
    }

    pub fn generation(&self) -> u64 {
        self.published.borrow().generation
    }

    pub(super) fn is_gone(&self) -> bool {
        self.published.borrow().gone
    }

    pub fn published(&self) -> Published {
        self.published.borrow().clone()
    }

    pub fn subscribe(&self) -> watch::Receiver<Published> {
        self.published.subscribe()
    }

    pub async fn start(self: &Arc<Self>) -> Result<(), Trouble> {
        self.ask(Request::Start).await
    }

    /// Returns when it is frozen.
    pub async fn pause(self: &Arc<Self>) -> Result<(), Trouble> {
        self.come_to_rest_for_good(Request::Pause).await
    }

    /// Returns when its memory is on disk for good, and its processes are gone.
    pub async fn hibernate(self: &Arc<Self>, why: &str) -> Result<(), Trouble> {
        let why = why.to_owned();
        self.come_to_rest_for_good(Request::Hibernate { why }).await
    }

    /// Freezes it, unless it is in use by then, or was used after `since`.
    pub async fn idle(self: &Arc<Self>, why: String, since: Instant) -> Result<(), Trouble> {
        self.ask(Request::Idle { why, since }).await
    }

    /// To disk, unless it was woken meanwhile.
    pub(super) async fn retire(self: &Arc<Self>, why: String) -> Result<(), Trouble> {
        self.ask(Request::Retire { why }).await
    }

    /// Returns when the memory of a box in standby is on disk too.
    pub async fn make_durable(self: &Arc<Self>) -> Result<(), Trouble> {
        self.ask(Request::MakeDurable).await
    }

    /// Returns at once if it runs. A failed agent is tried again.
    pub async fn ensure_running(self: &Arc<Self>) -> Result<(), Trouble> {
        match self.state() {
            State::Running => Ok(()),
            // It may be held still for a snapshot, which goes to the disk for a while after that.
            State::Freezing => {
                let mut published = self.subscribe();
                tokio::select! {
                    answer = self.ask(Request::EnsureRunning) => answer,
                    Ok(_) = published.wait_for(|published| published.status.state == State::Running) => Ok(()),
                }
            }
            _ => self.ask(Request::EnsureRunning).await,
        }
    }

    /// Returns when nothing of the box is left. An ephemeral agent is then gone.
    pub async fn stop(self: &Arc<Self>, grace: Option<Duration>) -> Result<(), Trouble> {
        let grace = grace.unwrap_or(self.ctx.stop_grace);
        self.come_to_rest_for_good(Request::Stop { grace }).await
    }

    pub async fn delete(self: &Arc<Self>) -> Result<(), Trouble> {
        self.ask(Request::Delete).await
    }

    /// Counts a request that is open to the guest, until the guard is dropped.
    pub fn open_request(self: &Arc<Self>) -> OpenRequest {
        self.open.fetch_add(1, Ordering::SeqCst);
        // With the one in `open_requests`: either the request sees that the agent goes to sleep, or
        // the one who puts it to sleep sees the request.
        fence(Ordering::SeqCst);
        self.touch();
        OpenRequest(self.clone())
    }

    /// Cuts all connections, of a box that is to have none.
    pub(super) async fn cut_links(&self) {
        tokio::join!(self.links.cut(), self.port_links.cut());
    }

    /// Cuts those that would stand in the way of an image. TCP connections of a container do not: they go on with it, and are closed in
    /// what is made of the image, which can tell that from a client that has gone. Those that nobody uses are no reason to trouble it.
    pub(super) async fn cut_links_for_image(&self) {
        match self.isolation() {
            Isolation::Container if self.open_requests() > 0 => self.links.cut().await,
            Isolation::Container | Isolation::Gvisor | Isolation::Vm => self.cut_links().await,
        }
    }

    pub fn open_requests(&self) -> usize {
        fence(Ordering::SeqCst);
        self.open.load(Ordering::SeqCst)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest memory image, stale or not.
    pub fn image(&self) -> Option<ImageRecord> {
        self.memory().image.clone()
    }

    /// Bytes of memory on disk, that of its snapshots included.
    pub async fn memory_on_disk(&self) -> u64 {
        images::held(self).await
    }

    /// The memory image that holds what the agent's memory is now.
    pub fn current_image(&self) -> Option<ImageRecord> {
        self.image().filter(|image| image.current)
    }

    /// Gives the one before.
    pub(super) fn set_image(&self, image: Option<ImageRecord>) -> Option<ImageRecord> {
        std::mem::replace(&mut self.memory().image, image)
    }

    /// What stands between its box and the machine.
    pub fn isolation(&self) -> Isolation {
        self.memory().isolation
    }

    pub(super) fn now_isolated_by(&self, isolation: Isolation) {
        self.memory().isolation = isolation;
    }

    /// What others take over from it as it is now.
    pub(super) fn origin(&self) -> Origin {
        let mut origin = Origin::of(&self.profile, &self.reach(), &self.network());
        origin.spec.isolation = self.isolation();
        origin.spec.sleep = self.sleep();
        origin
    }

    /// What a record that is not about the image says of it.
    pub(super) fn image_as_it_is(&self) -> ImageChange {
        match self.image() {
            Some(image) if !image.current => ImageChange::Stale,
            _ => ImageChange::Keep,
        }
    }

    /// The box goes on, or has gone on.
    pub(super) fn now_differs_from_image(&self) {
        if let Some(image) = &mut self.memory().image {
            image.current = false;
        }
    }

    pub(super) fn unseen_box(&self) -> Option<BoxRecord> {
        self.memory().unseen.as_deref().cloned()
    }

    pub(super) fn set_unseen_box(&self, record: Option<BoxRecord>) {
        self.memory().unseen = record.map(Box::new);
    }

    /// Whether its memory could not be saved and nothing has changed since.
    pub fn is_unsavable(&self) -> bool {
        match self.memory().unsavable {
            None => false,
            Some(Unsavable::AsItIs) => true,
            Some(Unsavable::Until(time)) => Instant::now() < time,
        }
    }

    pub(super) fn set_unsavable(&self, why: Unsavable) {
        self.memory().unsavable = Some(why);
    }

    /// It goes on, and may change.
    pub(super) fn may_be_savable(&self) {
        self.memory().unsavable = None;
    }

    fn savable_at(&self) -> Option<Instant> {
        match self.memory().unsavable {
            Some(Unsavable::Until(time)) => Some(time),
            Some(Unsavable::AsItIs) | None => None,
        }
    }

    /// Something reached for it, or it works.
    pub(super) fn touch(&self) {
        *self.quiet_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub fn quiet_since(&self) -> Instant {
        *self.quiet_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its processes were started a moment ago, and some may not be ready yet.
    pub fn is_coming_up(&self) -> bool {
        let started = *self.started.lock().unwrap_or_else(PoisonError::into_inner);
        let within = || match self.ctx.engine.about(self.isolation()).slow {
            true => COMING_UP_SLOWLY,
            false => COMING_UP,
        };
        started.is_some_and(|started| started.elapsed() < within())
    }

    pub(super) fn note_start(&self) {
        *self.started.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// What the watcher goes by.
    pub fn view(&self) -> View {
        let status = self.published().status;
        let asleep = Duration::from_millis((now() - status.since).max(0).unsigned_abs());
        let wall = Instant::now();
        View {
            state: status.state,
            open_requests: self.open_requests(),
            quiet_since: self.quiet_since(),
            held_until: self.held_until(),
            frozen_since: wall.checked_sub(asleep).unwrap_or(wall),
            saved: self.current_image().is_some(),
            savable: !self.is_unsavable() && self.can_save().is_ok(),
            savable_at: self.savable_at(),
            sampled: None,
        }
    }

    /// What the watcher last saw it do by itself.
    pub fn work(&self) -> Option<Note> {
        self.memory().work.clone()
    }

    pub(super) fn note_work(&self, what: String) {
        self.memory().work = Some(Note::now(what));
    }

    /// What last went wrong with putting its memory to disk or bringing it back.
    pub fn setback(&self) -> Option<Note> {
        self.memory().setback.clone()
    }

    /// Where it cannot be recorded, it is known until the daemon ends.
    pub(super) async fn note_setback(&self, what: String) {
        let setback = Note::now(what);
        self.memory().setback = Some(setback.clone());
        if let Err(error) = self.ctx.store.set_setback(&self.profile.id, &setback).await {
            tracing::warn!(agent = %self.profile.name, %error, "a setback could not be recorded");
        }
    }

    pub(super) async fn ask(self: &Arc<Self>, request: Request) -> Result<(), Trouble> {
        let (reply, answer) = oneshot::channel();
        self.enqueue(Asked {
            request,
            reply: Some(reply),
        });
        answer.await.unwrap_or(Err(Trouble::ShuttingDown))
    }

    /// Puts a request where the driver finds it, and calls a driver if there is none.
    pub(super) fn enqueue(self: &Arc<Self>, asked: Asked) {
        if self.ctx.is_closed() {
            return asked.answer(Err(Trouble::ShuttingDown));
        }
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        inbox.asked.push_back(asked);
        if inbox.driven {
            self.bell.notify_one();
        } else {
            inbox.driven = true;
            driver::spawn(self.clone());
        }
    }

    /// Its box and its memory image are as they were; only the state is another.
    pub(super) async fn record_state(&self, state: State, reason: &str) -> Result<(), Trouble> {
        let from = self.state();
        if from == state {
            return Ok(());
        }
        let status = Status::now(state, reason);
        let change = Change {
            agent: &self.profile.id,
            from,
            to: &status,
            at: status.since,
            millis: None,
            box_record: BoxChange::Keep,
            image: self.image_as_it_is(),
        };
        self.ctx.record(&change).await?;
        self.publish(status);
        Ok(())
    }

    pub(super) fn publish(&self, status: Status) {
        if status.state == State::Running {
            self.touch();
        }
        self.published.send_modify(|published| published.status = status);
    }

    /// A box answers from now on.
    pub(super) fn publish_box(&self, status: Status, record: BoxRecord) -> u64 {
        let mut generation = 0;
        self.touch();
        self.published.send_modify(|published| {
            published.generation += 1;
            generation = published.generation;
            published.status = status;
            published.current_box = Some(Arc::new(record));
        });
        generation
    }

    pub(super) fn publish_no_box(&self) {
        self.set_unseen_box(None);
        self.published
            .send_if_modified(|published| published.current_box.take().is_some());
    }

    pub(super) fn publish_whether_unwanted(&self, unwanted: bool) {
        self.published
            .send_if_modified(|published| std::mem::replace(&mut published.unwanted, unwanted) != unwanted);
    }

    pub(super) fn publish_whether_awaited(&self, awaited: bool) {
        self.published
            .send_if_modified(|published| std::mem::replace(&mut published.awaited, awaited) != awaited);
    }

    pub(super) fn publish_gone(&self) {
        self.published.send_modify(|published| {
            published.gone = true;
            published.current_box = None;
        });
    }

    /// `Ok` where memory images can be made of this agent's box, otherwise the reason why not.
    pub fn can_save(&self) -> Result<(), String> {
        self.ctx.engine.can_checkpoint(self.isolation())
    }

    /// What the engine is told about this agent's box.
    pub(super) fn box_spec(&self) -> BoxSpec {
        let profile = &self.profile;
        let defaults = &profile.defaults;
        let mut env = defaults.env.clone();
        env.extend(profile.spec.env.clone());
        env.insert(AGENT_ID_VARIABLE.to_owned(), profile.id.to_string());
        let start_command = defaults.start.clone();
        BoxSpec {
            id: profile.id.clone(),
            isolation: self.isolation(),
            hostname: profile.name.clone(),
            slot: profile.slot,
            uid_base: profile.uid_base,
            limits: profile.spec.limits.clone(),
            network: (*self.network()).clone(),
            volumes: profile.spec.volumes.clone(),
            boot: BootConfig {
                protocol: PROTOCOL_VERSION,
                agent_id: profile.id.to_string(),
                hostname: profile.name.clone(),
                env,
                default_user: defaults.user.clone(),
                default_workdir: defaults.workdir.clone(),
                start_command: start_command.map(|command| Command {
                    command,
                    user: defaults.user.clone(),
                    keeps_awake: defaults.start_keeps_awake,
                }),
                nameservers: self.ctx.nameservers.clone(),
            },
        }
    }
}

/// While this lives, the agent has an open request.
pub struct OpenRequest(Arc<Agent>);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.touch();
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}
