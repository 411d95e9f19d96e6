//! `filesystem.Filesystem`, as clients call it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use connectrpc::{ConnectError, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream};
use dorm_proto::filesystem::watch_dir_response::Event;
use dorm_proto::filesystem::{
    CreateWatcherRequest, CreateWatcherResponse, Filesystem, GetWatcherEventsRequest,
    GetWatcherEventsResponse, ListDirRequest, ListDirResponse, MakeDirRequest, MakeDirResponse, MoveRequest,
    MoveResponse, RemoveRequest, RemoveResponse, RemoveWatcherRequest, RemoveWatcherResponse, StatRequest,
    StatResponse, WatchDirRequest, WatchDirResponse,
};
use futures_util::stream;

use super::watch::{Watch, Watchers};
use super::{ops, path};
use crate::settings::Settings;
use crate::users::User;
use crate::{identity, request};

#[derive(Default)]
pub(crate) struct Service {
    settings: Arc<Settings>,
    watchers: Watchers,
}

impl Service {
    pub(crate) fn new(settings: Arc<Settings>) -> Self {
        Self {
            settings,
            watchers: Watchers::default(),
        }
    }

    fn user(&self, ctx: &RequestContext) -> Result<User, ConnectError> {
        request::user(&self.settings, ctx.headers(), None)
    }

    /// Does something with a path on a blocking thread, as the user of the request.
    async fn with_path<T: Send + 'static>(
        &self,
        ctx: &RequestContext,
        given: &str,
        f: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ConnectError> {
        let user = self.user(ctx)?;
        let path = absolute(&user, given)?;
        let told = path.display().to_string();
        identity::run(user, move || f(&path))
            .await
            .map_err(|e| request::file_error(&told, &e))
    }

    async fn watch(
        &self,
        ctx: &RequestContext,
        given: &str,
        recursive: bool,
        with_entry: bool,
    ) -> Result<Watch, ConnectError> {
        let user = self.user(ctx)?;
        let path = absolute(&user, given)?;
        let told = path.display().to_string();
        Watch::start(user, path, recursive, with_entry)
            .await
            .map_err(|e| match e.raw_os_error() {
                Some(libc::EMFILE | libc::ENOSPC) => ConnectError::resource_exhausted(format!(
                    "{told} cannot be watched: too many watches are in use"
                )),
                _ => request::file_error(&told, &e),
            })
    }
}

fn absolute(user: &User, given: &str) -> Result<PathBuf, ConnectError> {
    if given.contains('\0') {
        return Err(ConnectError::invalid_argument("the path holds a NUL byte"));
    }
    Ok(path::resolve(user, given))
}

fn watch_event(event: Event) -> WatchDirResponse {
    WatchDirResponse {
        event: Some(event),
        ..Default::default()
    }
}

impl Filesystem for Service {
    async fn stat(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StatRequest>,
    ) -> ServiceResult<StatResponse> {
        let entry = self.with_path(&ctx, request.path, ops::stat).await?;
        Response::ok(StatResponse {
            entry: entry.into(),
            ..Default::default()
        })
    }

    async fn make_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MakeDirRequest>,
    ) -> ServiceResult<MakeDirResponse> {
        let entry = self.with_path(&ctx, request.path, ops::make_dir).await?;
        Response::ok(MakeDirResponse {
            entry: entry.into(),
            ..Default::default()
        })
    }

    async fn r#move(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MoveRequest>,
    ) -> ServiceResult<MoveResponse> {
        let to = absolute(&self.user(&ctx)?, request.destination)?;
        let entry = self
            .with_path(&ctx, request.source, move |from| ops::rename(from, &to))
            .await?;
        Response::ok(MoveResponse {
            entry: entry.into(),
            ..Default::default()
        })
    }

    async fn list_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ListDirRequest>,
    ) -> ServiceResult<ListDirResponse> {
        let depth = request.depth;
        let entries = self
            .with_path(&ctx, request.path, move |path| ops::list(path, depth))
            .await?;
        Response::ok(ListDirResponse {
            entries,
            ..Default::default()
        })
    }

    async fn remove(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, RemoveRequest>,
    ) -> ServiceResult<RemoveResponse> {
        self.with_path(&ctx, request.path, ops::remove).await?;
        Response::ok(RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<WatchDirResponse>> {
        let watch = self
            .watch(&ctx, request.path, request.recursive, request.include_entry)
            .await?;
        let keepalive = request::keepalive(ctx.headers());
        let start = watch_event(Event::Start(Box::default()));
        Response::stream_ok(stream::unfold(
            (watch, vec![start].into_iter(), false),
            move |(mut watch, mut pending, failed)| async move {
                loop {
                    if let Some(event) = pending.next() {
                        return Some((Ok(event), (watch, pending, failed)));
                    }
                    if failed {
                        return None;
                    }
                    tokio::select! {
                        new = watch.next() => match new {
                            Ok(new) => {
                                let new = new.into_iter().map(|e| watch_event(Event::Filesystem(Box::new(e))));
                                pending = new.collect::<Vec<_>>().into_iter();
                            }
                            Err(e) => {
                                let e = ConnectError::internal(format!("the watch has failed: {e}"));
                                return Some((Err(e), (watch, pending, true)));
                            }
                        },
                        () = tokio::time::sleep(keepalive) => {
                            pending = vec![watch_event(Event::Keepalive(Box::default()))].into_iter();
                        }
                    }
                }
            },
        ))
    }

    async fn create_watcher(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, CreateWatcherRequest>,
    ) -> ServiceResult<CreateWatcherResponse> {
        let watch = self
            .watch(&ctx, request.path, request.recursive, request.include_entry)
            .await?;
        let watcher_id = self.watchers.add(watch)?;
        Response::ok(CreateWatcherResponse {
            watcher_id,
            ..Default::default()
        })
    }

    async fn get_watcher_events(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, GetWatcherEventsRequest>,
    ) -> ServiceResult<GetWatcherEventsResponse> {
        let events = self.watchers.take_events(request.watcher_id)?;
        Response::ok(GetWatcherEventsResponse {
            events,
            ..Default::default()
        })
    }

    async fn remove_watcher(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, RemoveWatcherRequest>,
    ) -> ServiceResult<RemoveWatcherResponse> {
        self.watchers.remove(request.watcher_id)?;
        Response::ok(RemoveWatcherResponse::default())
    }
}
