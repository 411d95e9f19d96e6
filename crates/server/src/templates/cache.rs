//! Finished templates by the hash of their recipe, for other data directories and for later.

use std::path::{Path, PathBuf};

use dorm_engine::chain;

use super::making::Making;
use super::{Result, TemplateError};

/// A place in the cache: the template, and beside it how large it is, which its file does not tell.
pub(super) struct Cached {
    template: PathBuf,
    size: PathBuf,
}

impl Cached {
    /// `None` if there is no cache.
    pub(super) fn of(making: &Making, hash: &str) -> Option<Self> {
        let directory = making.parts().config.template_cache.as_ref()?;
        let template = directory.join(format!("{hash}.tmpl"));
        Some(Self {
            size: template.with_extension("size"),
            template,
        })
    }

    /// Makes the template from the cache, and gives its size. `None` if it is not there, or cannot be
    /// used, which is no reason not to build.
    pub(super) async fn take(&self, making: &mut Making) -> Option<u64> {
        if !tokio::fs::try_exists(&self.template).await.unwrap_or(false) {
            return None;
        }
        making.report.plan(1);
        making.report.step("Take the template from the cache").await;
        let imported = making
            .parts()
            .homes
            .import_template(&making.id, &self.template)
            .await;
        if let Err(error) = imported {
            let warning = format!("warning: the cache has it, but {}; building it", chain(&error));
            making.report.line(warning).await;
            making.discard().await;
            return None;
        }
        let size = tokio::fs::read_to_string(&self.size).await.ok();
        match size.and_then(|size| size.trim().parse().ok()) {
            Some(size) => Some(size),
            None => Some(making.size().await),
        }
    }

    /// Puts the sealed template into the cache. It is no worse for not being there.
    pub(super) async fn keep(&self, making: &mut Making, size: u64) {
        making.report.step("Keep the template in the cache").await;
        let part = self.template.with_file_name(format!(".{}.part", making.id));
        if let Err(error) = self.write(making, &part, size).await {
            let _ = tokio::fs::remove_file(&part).await;
            let warning = format!("warning: it is not kept in the cache: {}", chain(&error));
            making.report.line(warning).await;
        }
    }

    /// Under another name first, so that the cache never has half a template.
    async fn write(&self, making: &Making, part: &Path, size: u64) -> Result<()> {
        if let Some(directory) = self.template.parent() {
            let made = tokio::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(directory)
                .await;
            made.map_err(TemplateError::io("make the directory of the cache"))?;
        }
        making.parts().homes.export_template(&making.id, part).await?;
        let sized = tokio::fs::write(&self.size, size.to_string()).await;
        sized.map_err(TemplateError::io("write the size of the cached template"))?;
        let renamed = tokio::fs::rename(part, &self.template).await;
        renamed.map_err(TemplateError::io("rename the cached template"))
    }
}
