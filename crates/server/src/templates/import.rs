//! From an uploaded archive to a template.

use std::io::SeekFrom;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use dorm_engine::Layer;
use dorm_engine::home::oci::{self, Image, ImageConfig, Upload};
use dorm_engine::home::unpack::NO_PASSWD;
use futures_util::{Stream, StreamExt as _};
use tokio::io::{AsyncSeekExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

use super::making::{DISK, Made, Making};
use super::{Result, TemplateError, Templates, recipe};
use crate::api::types::Progress;
use crate::records::{Built, TemplateDefaults, Workspace};

/// Left free on the filesystem of the data directory, whatever is uploaded.
const RESERVE: u64 = 512 << 20;
/// How often the free space is looked at.
const CHECK_EVERY: u64 = 32 << 20;

#[derive(Debug, Clone, Default)]
pub struct ImportOptions {
    /// Run the image's entrypoint and command in every box of the template.
    pub start: bool,
    /// How long the upload says it is.
    pub length: Option<u64>,
}

impl Templates {
    /// Receives an archive and makes template `name` of it. The upload is taken in and looked through
    /// before this returns, so that what is wrong with it is told at once.
    pub async fn import<E>(
        self: &Arc<Self>,
        workspace: &Workspace,
        name: &str,
        options: ImportOptions,
        body: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<mpsc::Receiver<Progress>>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        recipe::check_name(name)?;
        let claim = self.claim(workspace, name)?;
        let upload = self.receive(options.length, body).await?;
        let tmp = self.tmp();
        let upload = blocking(move || {
            let room = oci::room(&tmp).map_err(TemplateError::io("measure the free space"))?;
            oci::analyse(upload, &tmp, room.saturating_sub(RESERVE)).map_err(TemplateError::Upload)
        })
        .await?;
        let (making, progress) = Making::begin(self, claim).await?;
        let import = Import {
            making,
            start: options.start,
        };
        self.tasks.spawn(import.go(upload));
        Ok(progress)
    }

    fn tmp(&self) -> PathBuf {
        self.parts.config.data.join("tmp")
    }

    /// The upload, in a file that has no name and goes away with its last descriptor.
    pub(super) async fn receive<E>(
        &self,
        length: Option<u64>,
        body: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<std::fs::File>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let tmp = self.tmp();
        tokio::fs::create_dir_all(&tmp)
            .await
            .map_err(TemplateError::io("make the directory of uploads"))?;
        require_room(&tmp, length.unwrap_or(0)).await?;
        let file = blocking({
            let tmp = tmp.clone();
            move || tempfile::tempfile_in(tmp).map_err(TemplateError::io("make a file for the upload"))
        })
        .await?;
        let mut file = tokio::fs::File::from_std(file);
        let mut since_check = 0;
        let mut body = std::pin::pin!(body);
        while let Some(chunk) = body.next().await {
            let chunk = chunk.map_err(|e| TemplateError::UploadBroken(e.into()))?;
            since_check += chunk.len() as u64;
            if since_check >= CHECK_EVERY {
                since_check = 0;
                require_room(&tmp, 0).await?;
            }
            file.write_all(&chunk)
                .await
                .map_err(TemplateError::io("write the upload"))?;
        }
        file.flush()
            .await
            .map_err(TemplateError::io("write the upload"))?;
        file.seek(SeekFrom::Start(0))
            .await
            .map_err(TemplateError::io("read the upload"))?;
        Ok(file.into_std().await)
    }
}

async fn require_room(tmp: &std::path::Path, length: u64) -> Result<()> {
    let tmp = tmp.to_owned();
    blocking(move || {
        let free = oci::room(&tmp).map_err(TemplateError::io("measure the free space"))?;
        if free < length.saturating_add(RESERVE) {
            Err(TemplateError::NoRoom { free })
        } else {
            Ok(())
        }
    })
    .await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| TemplateError::io("finish the work")(std::io::Error::other(e)))?
}

struct Import {
    making: Making,
    start: bool,
}

impl Import {
    async fn go(mut self, upload: Upload) {
        let outcome = self.make(upload).await;
        self.making.conclude(outcome).await;
    }

    async fn make(&mut self, upload: Upload) -> Result<Made> {
        let (layers, defaults) = match upload {
            Upload::Rootfs(layer) => (vec![layer], TemplateDefaults::default()),
            Upload::Image(image) => (layers(&image)?, defaults(&image.config, self.start)),
        };
        self.making.report.plan(layers.len() + 1);
        let (_, uid_base) = self.making.take_slot().await?;
        let (homes, id) = (&self.making.parts().homes, &self.making.id);
        homes.create_empty(id).await?;
        homes.set_limit(id, DISK).await?;
        let count = layers.len();
        for (n, layer) in layers.into_iter().enumerate() {
            self.making
                .report
                .step(format!("Unpack layer {} of {count}", n + 1))
                .await;
            self.unpack(uid_base, layer, n + 1 == count).await?;
        }
        self.making.seal().await?;
        let size = self.making.size().await;
        let template = self.making.record(None, size, defaults, Built::default()).await?;
        let template = self.making.templates.view(template).await?;
        Ok((template, false))
    }

    /// Not broken off in the middle: a layer takes seconds, and its process must be gone before the home is.
    async fn unpack(&mut self, uid_base: u32, layer: Layer, last: bool) -> Result<()> {
        let (homes, id) = (self.making.parts().homes.clone(), self.making.id.clone());
        let report = &mut self.making.report;
        let (sink, mut lines) = mpsc::unbounded_channel();
        let unpacked = homes.unpack(&id, uid_base, layer, sink).await;
        while let Ok(line) = lines.try_recv() {
            // Lower layers need not have one.
            if last || !line.contains(NO_PASSWD) {
                report.line(line).await;
            }
        }
        unpacked?;
        let abandoned = report.abandoned();
        tokio::select! {
            biased;
            () = abandoned => Err(TemplateError::Cancelled),
            () = std::future::ready(()) => Ok(()),
        }
    }
}

fn layers(image: &Image) -> Result<Vec<Layer>> {
    let all = (0..image.layers.len())
        .map(|n| image.layer(n))
        .collect::<std::io::Result<_>>();
    all.map_err(TemplateError::io("open the image's layers"))
}

fn defaults(config: &ImageConfig, start: bool) -> TemplateDefaults {
    let command: Vec<String> = config
        .entrypoint
        .iter()
        .chain(&config.cmd)
        .map(|word| quoted(word))
        .collect();
    TemplateDefaults {
        env: config.env.clone(),
        // The group is that of the user's entry in /etc/passwd.
        user: config
            .user
            .as_deref()
            .and_then(|user| user.split(':').next())
            .map(str::to_owned),
        workdir: config.workdir.clone(),
        start: (start && !command.is_empty()).then(|| command.join(" ")),
        ..TemplateDefaults::default()
    }
}

/// The word as a shell reads it literally.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_images_command_becomes_one_line_for_a_shell() {
        let config = ImageConfig {
            entrypoint: vec!["/bin/entry".into(), "-x".into()],
            cmd: vec!["it's".into(), String::new(), "a b".into()],
            user: Some("app:staff".into()),
            ..ImageConfig::default()
        };
        let with = defaults(&config, true);
        assert_eq!(with.start.as_deref(), Some(r"/bin/entry -x 'it'\''s' '' 'a b'"));
        assert_eq!(with.user.as_deref(), Some("app"));
        assert_eq!(defaults(&config, false).start, None);
        assert_eq!(defaults(&ImageConfig::default(), true).start, None);
    }
}
