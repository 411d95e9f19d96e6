//! The one task that changes an agent.
//!
//! ```text
//!   ask ──▶ inbox ──▶ decide ──▶ answer at once          (done, refuse)
//!                        ├─────▶ transition, then answer (begin, join)
//!                        └─────▶ waiting ──▶ decide again once the transition has ended
//! ```
//!
//! It lives from the first request to the last answer. A transition runs as a task of its own, so that
//! requests are decided meanwhile and a bug in it ends the transition, not the driver.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, PoisonError};

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::agent::{Answer, Asked};
use super::decide::{
    Decision, Refusal, Request, Rest, Situation, Transition, Work, decide, during, is_recorded_first,
};
use super::{Agent, Trouble, transition};
use crate::records::State;

struct Driver {
    agent: Arc<Agent>,
    under_way: Option<UnderWay>,
    waiting: VecDeque<Asked>,
}

struct UnderWay {
    work: Work,
    /// What the store says of the agent meanwhile.
    recorded: State,
    task: JoinHandle<Answer>,
    joined: Vec<oneshot::Sender<Answer>>,
}

/// Drives an agent whose inbox has something. The caller has marked it as driven.
pub(super) fn spawn(agent: Arc<Agent>) {
    let tasks = agent.ctx.tasks.clone();
    tasks.spawn(
        Driver {
            agent,
            under_way: None,
            waiting: VecDeque::new(),
        }
        .run(),
    );
}

/// Goes on with a transition whose beginning is recorded already, by whoever made the agent known.
/// `from` is where it began.
pub(super) fn resume(agent: &Arc<Agent>, transition: Transition, from: Rest) -> oneshot::Receiver<Answer> {
    let (reply, answer) = oneshot::channel();
    agent.inbox.lock().unwrap_or_else(PoisonError::into_inner).driven = true;
    let mut driver = Driver {
        agent: agent.clone(),
        under_way: None,
        waiting: VecDeque::new(),
    };
    let (work, recorded) = (Work::of(&transition), during(&transition));
    let task = agent
        .ctx
        .tasks
        .spawn(transition::resume(agent.clone(), transition, from));
    driver.under_way = Some(UnderWay {
        work,
        recorded,
        task,
        joined: vec![reply],
    });
    agent.ctx.tasks.spawn(driver.run());
    answer
}

impl Driver {
    async fn run(mut self) {
        loop {
            while let Some(asked) = self.next_asked() {
                self.decide(asked);
            }
            if let Some(under_way) = &mut self.under_way {
                tokio::select! {
                    () = self.agent.bell.notified() => {}
                    ended = &mut under_way.task => self.ended(ended).await,
                }
            } else if self.rest() {
                return;
            }
        }
    }

    fn next_asked(&self) -> Option<Asked> {
        self.agent
            .inbox
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .asked
            .pop_front()
    }

    /// Gives up the agent, unless something was asked in this very moment.
    fn rest(&self) -> bool {
        let mut inbox = self.agent.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        inbox.driven = !inbox.asked.is_empty();
        if !inbox.driven {
            inbox.asked.shrink_to_fit();
        }
        !inbox.driven
    }

    fn decide(&mut self, mut asked: Asked) {
        if self.agent.is_gone() {
            return asked.answer(Err(Trouble::NotFound(self.agent.profile.name.clone())));
        }
        if asked.request == Request::EnsureRunning && asked.nobody_waits() {
            return;
        }
        if let Request::BoxExited {
            generation, saved, ..
        } = &mut asked.request
        {
            if *generation != self.agent.generation() {
                return asked.answer(Ok(()));
            }
            *saved = self.agent.current_image().is_some();
        }
        if let (Request::Convert { to, .. }, None) = (&asked.request, &self.under_way)
            && *to == self.agent.isolation()
        {
            return asked.answer(Ok(()));
        }
        let situation = match &self.under_way {
            Some(under_way) => Situation::Busy(under_way.work),
            None => Situation::At(self.agent.rest()),
        };
        match decide(situation, self.agent.profile.lifetime, &asked.request) {
            Decision::Done => asked.answer(Ok(())),
            Decision::Refuse(refusal) => asked.answer(Err(refusal.into())),
            Decision::Begin(transition) => self.begin(transition, asked.reply),
            Decision::Join => {
                if let (Some(under_way), Some(reply)) = (&mut self.under_way, asked.reply) {
                    under_way.joined.push(reply);
                }
            }
            Decision::Wait => self.waiting.push_back(asked),
            Decision::Hurry => {
                // Whoever came before is served first, and may need what is under way.
                let reaches =
                    |earlier: &Asked| matches!(earlier.request, Request::Start | Request::EnsureRunning);
                if self.waiting.iter().all(reaches) {
                    self.agent.publish_whether_awaited(true);
                }
                self.waiting.push_back(asked);
            }
            Decision::Overrule => {
                self.refuse_all(Refusal::BeingDeleted);
                self.agent.publish_whether_unwanted(true);
                self.waiting.push_back(asked);
            }
        }
    }

    fn begin(&mut self, transition: Transition, reply: Option<oneshot::Sender<Answer>>) {
        let work = Work::of(&transition);
        self.agent.publish_whether_unwanted(false);
        self.agent.publish_whether_awaited(false);
        let recorded = match is_recorded_first(&transition) {
            true => during(&transition),
            false => self.agent.state(),
        };
        let task = self
            .agent
            .ctx
            .tasks
            .spawn(transition::run(self.agent.clone(), transition));
        self.under_way = Some(UnderWay {
            work,
            recorded,
            task,
            joined: reply.into_iter().collect(),
        });
    }

    /// Whoever waits for something else than the end.
    fn refuse_all(&mut self, refusal: Refusal) {
        // Whoever asked for a snapshot hears how it ended, since it may be theirs to delete.
        let joined = self
            .under_way
            .as_mut()
            .filter(|under_way| under_way.work != Work::Snapshot)
            .map(|under_way| mem::take(&mut under_way.joined));
        for reply in joined.into_iter().flatten() {
            let _ = reply.send(Err(refusal.into()));
        }
        for asked in mem::take(&mut self.waiting) {
            match asked.request {
                Request::Delete => self.waiting.push_back(asked),
                Request::Start
                | Request::EnsureRunning
                | Request::Pause
                | Request::Idle { .. }
                | Request::Retire { .. }
                | Request::Hibernate { .. }
                | Request::MakeDurable
                | Request::Snapshot { .. }
                | Request::RollBack { .. }
                | Request::Convert { .. }
                | Request::Stop { .. }
                | Request::BoxExited { .. } => asked.answer(Err(refusal.into())),
            }
        }
    }

    async fn ended(&mut self, ended: Result<Answer, tokio::task::JoinError>) {
        let Some(under_way) = self.under_way.take() else {
            return;
        };
        let answer = match ended {
            Ok(answer) => answer,
            Err(bug) => transition::broken(&self.agent, under_way.work, under_way.recorded, &bug).await,
        };
        for reply in under_way.joined {
            let _ = reply.send(answer.clone());
        }
        self.agent.ctx.look_at(&self.agent);
        for asked in mem::take(&mut self.waiting) {
            self.decide(asked);
        }
    }
}
