//! What a client attached to a run is sent.

use std::sync::Arc;
use std::time::Duration;

use connectrpc::ConnectError;
use dorm_proto::process::ProcessEvent;
use dorm_proto::process::process_event::data_event::Output;
use dorm_proto::process::process_event::{DataEvent, Event, StartEvent};
use futures_util::stream::{Stream, unfold};

use super::Run;
use super::output::{Piece, Reader, Stream as From};

struct Attached {
    run: Arc<Run>,
    reader: Reader,
    keepalive: Duration,
    /// Such a client learns of its deadline as the Connect protocol has it.
    deadline_is_error: bool,
    phase: Phase,
}

enum Phase {
    Start,
    Output,
    Done,
}

fn event(event: Event) -> ProcessEvent {
    ProcessEvent {
        event: Some(event),
        ..Default::default()
    }
}

fn data(piece: Piece) -> ProcessEvent {
    let output = match piece.stream {
        From::Stdout => Output::Stdout(piece.data),
        From::Stderr => Output::Stderr(piece.data),
        From::Pty => Output::Pty(piece.data),
    };
    let data = DataEvent {
        offset: piece.offset,
        output: Some(output),
        ..Default::default()
    };
    event(Event::Data(Box::new(data)))
}

pub(super) fn attach(
    run: Arc<Run>,
    reader: Reader,
    keepalive: Duration,
    deadline_is_error: bool,
) -> impl Stream<Item = Result<ProcessEvent, ConnectError>> {
    let attached = Attached {
        run,
        reader,
        keepalive,
        deadline_is_error,
        phase: Phase::Start,
    };
    unfold(attached, |mut attached| async move {
        let event = attached.next().await?;
        Some((event, attached))
    })
}

impl Attached {
    async fn next(&mut self) -> Option<Result<ProcessEvent, ConnectError>> {
        match self.phase {
            Phase::Start => {
                self.phase = Phase::Output;
                let pid = self.run.pid.unsigned_abs();
                let start = StartEvent {
                    pid,
                    run_id: self.run.id.clone(),
                    ..Default::default()
                };
                Some(Ok(event(Event::Start(Box::new(start)))))
            }
            Phase::Output => tokio::select! {
                biased;
                piece = self.reader.next() => Some(match piece {
                    Some(piece) => Ok(data(piece)),
                    None => {
                        self.phase = Phase::Done;
                        self.end()
                    }
                }),
                () = tokio::time::sleep(self.keepalive) => {
                    Some(Ok(event(Event::Keepalive(Box::default()))))
                }
            },
            Phase::Done => None,
        }
    }

    fn end(&self) -> Result<ProcessEvent, ConnectError> {
        let end = self
            .run
            .ended()
            .ok_or_else(|| ConnectError::internal("the run's output ended before it"))?;
        if end.event.timed_out && self.deadline_is_error {
            return Err(ConnectError::deadline_exceeded(
                "the run was killed at its deadline",
            ));
        }
        Ok(event(Event::End(Box::new(end.event.clone()))))
    }
}
