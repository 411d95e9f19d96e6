//! `process.Process`, as clients call it.

use std::sync::Arc;
use std::time::Duration;

use connectrpc::{
    ConnectError, InboundStream, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream,
};
use dorm_proto::process::process_input::Input;
use dorm_proto::process::stream_input_request::Event;
use dorm_proto::process::{
    CloseStdinRequest, CloseStdinResponse, ConnectRequest, ConnectResponse, FeedInputRequest,
    FeedInputResponse, ForgetRequest, ForgetResponse, ListRequest, ListResponse, Process, ProcessInput,
    SendInputRequest, SendInputResponse, SendSignalRequest, SendSignalResponse, StartRequest, StartResponse,
    StreamInputRequest, StreamInputResponse, UpdateRequest, UpdateResponse,
};
use futures_util::StreamExt;
use tokio::time::Instant;

use super::{Run, Runs, events};
use crate::machine;
use crate::request;
use crate::settings::Settings;

pub(crate) struct Service {
    pub(crate) runs: Arc<Runs>,
    pub(crate) settings: Arc<Settings>,
}

/// What is to be written, and whether to the terminal.
fn content(input: Option<&ProcessInput>) -> Result<(&[u8], bool), ConnectError> {
    match input.and_then(|i| i.input.as_ref()) {
        Some(Input::Stdin(data)) => Ok((data, false)),
        Some(Input::Pty(data)) => Ok((data, true)),
        None => Err(ConnectError::invalid_argument("the request holds no input")),
    }
}

impl Process for Service {
    async fn list(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, ListRequest>,
    ) -> ServiceResult<ListResponse> {
        Response::ok(ListResponse {
            processes: self.runs.list(request.ended),
            ..Default::default()
        })
    }

    async fn connect(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ConnectRequest>,
    ) -> ServiceResult<ServiceStream<ConnectResponse>> {
        let request = request.to_owned_message();
        let run = self.runs.find(request.process.as_option())?;
        let from = request.replay_from.or_else(|| run.ended().map(|_| 0));
        let reader = run.output.subscribe(from);
        let stream = events::attach(run, reader, request::keepalive(ctx.headers()), false);
        Response::stream_ok(stream.map(|e| {
            e.map(|event| ConnectResponse {
                event: event.into(),
                ..Default::default()
            })
        }))
    }

    async fn start(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StartRequest>,
    ) -> ServiceResult<ServiceStream<StartResponse>> {
        let request = request.to_owned_message();
        let named = request.user.as_deref().filter(|u| !u.is_empty());
        let user = request::user(&self.settings, ctx.headers(), named)?;
        let asked = ctx.deadline().map(Instant::from_std);
        let own = match request.timeout_ms {
            0 => None,
            ms => Instant::now().checked_add(Duration::from_millis(ms)),
        };
        let deadline_is_error = own.is_none();
        let deadline = asked.into_iter().chain(own).min();
        // A process that began in a held group would hold whoever starts it, too.
        machine::until_released().await;
        let (run, reader) = self.runs.start(&request, &user, deadline)?;
        let stream = events::attach(run, reader, request::keepalive(ctx.headers()), deadline_is_error);
        Response::stream_ok(stream.map(|e| {
            e.map(|event| StartResponse {
                event: event.into(),
                ..Default::default()
            })
        }))
    }

    async fn update(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, UpdateRequest>,
    ) -> ServiceResult<UpdateResponse> {
        let request = request.to_owned_message();
        let run = self.runs.find(request.process.as_option())?;
        if let Some(size) = request.pty.as_option().and_then(|p| p.size.as_option()) {
            run.resize(size.cols, size.rows)?;
        }
        Response::ok(UpdateResponse::default())
    }

    async fn stream_input(
        &self,
        _ctx: RequestContext,
        mut requests: InboundStream<StreamInputRequest>,
    ) -> ServiceResult<StreamInputResponse> {
        let mut run: Option<Arc<Run>> = None;
        while let Some(message) = requests.next().await {
            match message?.to_owned_message().event {
                Some(Event::Start(start)) => run = Some(self.runs.find(start.process.as_option())?),
                Some(Event::Data(data)) => {
                    let run = run
                        .as_ref()
                        .ok_or_else(|| ConnectError::invalid_argument("input came before the start event"))?;
                    let (data, to_terminal) = content(data.input.as_option())?;
                    run.input(data, to_terminal).await?;
                }
                Some(Event::Keepalive(_)) | None => {}
            }
        }
        Response::ok(StreamInputResponse::default())
    }

    async fn send_input(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, SendInputRequest>,
    ) -> ServiceResult<SendInputResponse> {
        let request = request.to_owned_message();
        let run = self.runs.find(request.process.as_option())?;
        let (data, to_terminal) = content(request.input.as_option())?;
        run.input(data, to_terminal).await?;
        Response::ok(SendInputResponse::default())
    }

    async fn feed_input(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, FeedInputRequest>,
    ) -> ServiceResult<FeedInputResponse> {
        let request = request.to_owned_message();
        let run = self.runs.find(request.process.as_option())?;
        let (data, to_terminal) = content(request.input.as_option())?;
        run.feed(data, to_terminal, request.offset).await?;
        Response::ok(FeedInputResponse::default())
    }

    async fn send_signal(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, SendSignalRequest>,
    ) -> ServiceResult<SendSignalResponse> {
        let request = request.to_owned_message();
        let run = self.runs.find(request.process.as_option())?;
        let number = match request.number {
            0 => request.signal.to_i32(),
            number => i32::try_from(number).unwrap_or(i32::MAX),
        };
        if number == 0 {
            return Err(ConnectError::invalid_argument("the request names no signal"));
        }
        run.signal(number, request.group)?;
        Response::ok(SendSignalResponse::default())
    }

    async fn close_stdin(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, CloseStdinRequest>,
    ) -> ServiceResult<CloseStdinResponse> {
        let run = self.runs.find(request.to_owned_message().process.as_option())?;
        run.close_stdin().await?;
        Response::ok(CloseStdinResponse::default())
    }

    async fn forget(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, ForgetRequest>,
    ) -> ServiceResult<ForgetResponse> {
        let run = self.runs.find(request.to_owned_message().process.as_option())?;
        self.runs.forget(&run)?;
        Response::ok(ForgetResponse::default())
    }
}
