//! From a recipe to a template.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use dorm_engine::{BootConfig, BoxSpec, Debian, Isolation, Limits};
use dorm_proto::boot::PROTOCOL_VERSION;
use tokio::sync::mpsc;

use super::cache::Cached;
use super::making::{DISK, Made, Making};
use super::recipe::{self, Identity, Source};
use super::script::{Place, Placed};
use super::steps::{BoxStep, HostCa};
use super::{Result, Script, TemplateError, Templates};
use crate::api::types::{BuildTemplate, Progress, Recipe, Template};
use crate::guest_client::{GuestClient, GuestError};
use crate::records::{Built, TemplateDefaults, TemplateLimits, TemplateRecord, Workspace};
use crate::store::StoreError;

/// A build has the machine's cores, and these.
const MEMORY: u64 = 4 << 30;
const PIDS: u32 = 4096;
const GRACE: Duration = Duration::from_secs(10);

impl Templates {
    /// Builds template `name`, or finds that it is there already. What is wrong with the request is
    /// told at once; everything after that by the progress. Dropping the receiver ends the build.
    pub async fn build(
        self: &Arc<Self>,
        workspace: &Workspace,
        name: &str,
        request: BuildTemplate,
    ) -> Result<mpsc::Receiver<Progress>> {
        let BuildTemplate { recipe, force } = request;
        self.begin(workspace, name, recipe, None, force).await
    }

    /// The same with instructions after the recipe.
    pub async fn build_script(
        self: &Arc<Self>,
        workspace: &Workspace,
        name: &str,
        recipe: Recipe,
        script: Script,
        force: bool,
    ) -> Result<mpsc::Receiver<Progress>> {
        self.begin(workspace, name, recipe, Some(script), force).await
    }

    async fn begin(
        self: &Arc<Self>,
        workspace: &Workspace,
        name: &str,
        recipe: Recipe,
        script: Option<Script>,
        force: bool,
    ) -> Result<mpsc::Receiver<Progress>> {
        recipe::check_name(name)?;
        recipe::check(&recipe)?;
        let claim = self.claim(workspace, name)?;
        let store = &self.parts.store;
        let parent = match recipe::source(&recipe)? {
            Source::Debian { .. } => None,
            Source::Template { name } => Some(store.template_by_name_or_id(workspace, name).await?),
        };
        if let Some(parent) = &parent {
            claim.made_from(&parent.id);
        }
        let host_ca = match &self.parts.config.host_ca {
            Some(bundle) => Some(HostCa::read(bundle).await?),
            None => None,
        };
        let identity = Identity {
            recipe: &recipe,
            parent: parent
                .as_ref()
                .map(|p| p.recipe_hash.as_deref().unwrap_or(p.id.as_str())),
            host_ca: host_ca.as_ref().map(HostCa::hash),
            script: script.as_ref(),
        };
        let hash = identity.hash();

        if !force && let Some(existing) = self.existing(workspace, name, &hash).await? {
            let (to, progress) = mpsc::channel(1);
            let template = self.view(existing).await?;
            let _ = to
                .send(Progress::Done {
                    template,
                    cached: true,
                })
                .await;
            return Ok(progress);
        }
        let (making, progress) = Making::begin(self, claim).await?;
        let build = Build {
            making,
            recipe,
            parent,
            host_ca,
            hash,
            force,
            script,
        };
        self.tasks.spawn(build.go());
        Ok(progress)
    }

    async fn existing(
        &self,
        workspace: &Workspace,
        name: &str,
        hash: &str,
    ) -> Result<Option<TemplateRecord>> {
        match self.parts.store.template_by_name_or_id(workspace, name).await {
            Ok(record) => {
                Ok(Some(record).filter(|r| r.name == name && r.recipe_hash.as_deref() == Some(hash)))
            }
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

struct Build {
    making: Making,
    recipe: Recipe,
    parent: Option<TemplateRecord>,
    host_ca: Option<HostCa>,
    hash: String,
    force: bool,
    script: Option<Script>,
}

impl Build {
    async fn go(mut self) {
        let outcome = self.make().await;
        self.making.conclude(outcome).await;
    }

    async fn make(&mut self) -> Result<Made> {
        // What a builder sends is one program's own, and changes often: no other data directory would take it.
        let cached = match self.script {
            None => Cached::of(&self.making, &self.hash),
            Some(_) => None,
        };
        if !self.force
            && let Some(cached) = &cached
            && let Some(size) = cached.take(&mut self.making).await
        {
            return Ok((self.record(size).await?, true));
        }
        let steps = self.box_steps();
        let in_box = if steps.is_empty() { 0 } else { 1 + steps.len() };
        self.making
            .report
            .plan(1 + in_box + 1 + usize::from(cached.is_some()));
        self.make_home().await?;
        if !steps.is_empty() {
            self.run_in_box(&steps).await?;
        }
        self.making.seal().await?;
        let size = self.making.size().await;
        if let Some(cached) = &cached {
            cached.keep(&mut self.making, size).await;
        }
        Ok((self.record(size).await?, false))
    }

    async fn record(&mut self, size: u64) -> Result<Template> {
        let defaults = self.defaults();
        let inherited = self.parent.as_ref().map(|parent| parent.built.limits);
        let (limits, build) = match &self.script {
            Some(script) => (script.limits, script.build.clone()),
            None => (TemplateLimits::default(), None),
        };
        let built = Built {
            limits: limits.or(inherited.unwrap_or_default()),
            build,
        };
        let hash = Some(self.hash.clone());
        let record = self.making.record(hash, size, defaults, built).await?;
        self.making.templates.view(record).await
    }

    async fn make_home(&mut self) -> Result<()> {
        let making = &mut self.making;
        let (homes, id) = (making.parts().homes.clone(), making.id.clone());
        match (recipe::source(&self.recipe)?, &self.parent) {
            (Source::Debian { suite }, _) => {
                making.report.step(format!("Bootstrap Debian {suite}")).await;
                homes.create_empty(&id).await?;
                homes.set_limit(&id, DISK).await?;
                let debian = Debian {
                    suite: suite.to_owned(),
                    packages: self.recipe.apt.clone(),
                };
                let abandoned = making.report.abandoned();
                let bootstrap = |log| async move {
                    tokio::select! {
                        done = homes.bootstrap(&id, &debian, log) => Ok(done?),
                        () = abandoned => Err(TemplateError::Cancelled),
                    }
                };
                making.report.following(bootstrap).await
            }
            (Source::Template { name }, Some(parent)) => {
                making.report.step(format!("Copy template {name}")).await;
                let templates = making.templates.clone();
                let _files = templates.files.lock().await;
                // It may have been replaced, and its files removed, since the request was read.
                let workspace = making.claim().workspace();
                match making
                    .parts()
                    .store
                    .template_by_name_or_id(workspace, parent.id.as_str())
                    .await
                {
                    Ok(_) => Ok(homes.create(&id, &parent.id, DISK).await?),
                    Err(StoreError::NotFound { .. }) => Err(TemplateError::ParentReplaced(name.to_owned())),
                    Err(e) => Err(e.into()),
                }
            }
            (Source::Template { name }, None) => Err(TemplateError::ParentReplaced(name.to_owned())),
        }
    }

    /// What has to be done inside the template, in order.
    fn box_steps(&self) -> Vec<BoxStep> {
        let recipe = &self.recipe;
        let mut steps = Vec::new();
        steps.extend(self.host_ca.clone().map(BoxStep::TrustHost));
        // A bootstrapped Debian has its packages already.
        if self.parent.is_some() && !recipe.apt.is_empty() {
            steps.push(BoxStep::Install(recipe.apt.clone()));
        }
        let user = recipe
            .user
            .as_deref()
            .filter(|user| *user != "root" && user.parse::<u32>().is_err());
        let make_user = user.map(|user| BoxStep::User(user.to_owned()));
        // A command may be what makes the user, so that dorm does it last; but files can only be given to one that is there.
        let owner = |owner: &str| owner.split(':').any(|part| Some(part) == user);
        if recipe
            .files
            .iter()
            .any(|file| file.owner.as_deref().is_some_and(owner))
        {
            steps.extend(make_user.clone());
        }
        if !recipe.files.is_empty() {
            steps.push(BoxStep::Files(recipe.files.clone()));
        }
        steps.extend(recipe.run.iter().cloned().map(BoxStep::Run));
        steps.extend(self.placed().0.into_iter().map(BoxStep::Instruction));
        if !steps.contains(&BoxStep::User(user.unwrap_or_default().to_owned())) {
            steps.extend(make_user);
        }
        if !steps.is_empty() && self.script.is_none() {
            steps.push(BoxStep::CleanUp);
        }
        steps
    }

    async fn run_in_box(&mut self, steps: &[BoxStep]) -> Result<()> {
        let (slot, uid_base) = self.making.take_slot().await?;
        let spec = self.box_spec(slot, uid_base);
        let making = &mut self.making;
        let (engine, id) = (making.parts().engine.clone(), making.id.clone());
        making.report.step("Start a box to build in").await;
        engine.start(&spec).await?;
        let guest = GuestClient::new(engine.clone(), id.clone());
        let mut ended = pin!(engine.exited(&id));
        for step in steps {
            making.report.step(step.title()).await;
            let abandoned = making.report.abandoned();
            let done = tokio::select! {
                done = step.perform(&guest, &mut making.report) => done,
                exit = &mut ended => return Err(TemplateError::BoxEnded(exit?.reason)),
                () = abandoned => return Err(TemplateError::Cancelled),
            };
            // The guest's end is seen before the box's, which says why.
            if let Err(TemplateError::Guest(GuestError::Connect(_) | GuestError::Broken(_))) = &done
                && let Ok(Ok(exit)) = tokio::time::timeout(GRACE, &mut ended).await
            {
                return Err(TemplateError::BoxEnded(exit.reason));
            }
            done?;
        }
        Ok(engine.stop(&id, GRACE).await?)
    }

    fn box_spec(&self, slot: u32, uid_base: u32) -> BoxSpec {
        let id = self.making.id.clone();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        BoxSpec {
            isolation: Isolation::Container,
            hostname: "build".to_owned(),
            slot,
            uid_base,
            limits: Limits {
                cpu_millis: u32::try_from(cores)
                    .unwrap_or(u32::MAX / 1000)
                    .saturating_mul(1000),
                memory: total_memory().map_or(MEMORY, |total| MEMORY.min(total / 2)),
                pids: PIDS,
                disk: DISK,
                io_bps: None,
            },
            network: Default::default(),
            volumes: Vec::new(),
            boot: BootConfig {
                protocol: PROTOCOL_VERSION,
                agent_id: id.to_string(),
                hostname: "build".to_owned(),
                env: self.defaults().env,
                default_user: Some("root".to_owned()),
                default_workdir: None,
                start_command: None,
                nameservers: self.making.parts().config.nameservers.clone(),
            },
            id,
        }
    }

    /// The instructions, and what they lead to.
    fn placed(&self) -> (Vec<Placed>, Place) {
        let before = self.before();
        let place = Place {
            user: before.user,
            workdir: before.workdir,
            env: before.env,
        };
        match &self.script {
            Some(script) => script.placed(place),
            None => (Vec::new(), place),
        }
    }

    fn defaults(&self) -> TemplateDefaults {
        let (_, place) = self.placed();
        let before = self.before();
        let ready = self.script.as_ref().and_then(|script| script.ready.clone());
        TemplateDefaults {
            env: place.env,
            user: place.user,
            workdir: place.workdir,
            start: before.start,
            start_keeps_awake: before.start_keeps_awake,
            ready: ready.or(before.ready),
        }
    }

    /// The parent's, then the host's certificates, then the recipe's own.
    fn before(&self) -> TemplateDefaults {
        let recipe = &self.recipe;
        let parent = self
            .parent
            .as_ref()
            .map(|p| p.defaults.clone())
            .unwrap_or_default();
        let mut env = parent.env;
        if self.host_ca.is_some() {
            env.extend(HostCa::env());
        }
        env.extend(recipe.env.clone());
        let inherited = recipe.start.is_none() && parent.start_keeps_awake;
        TemplateDefaults {
            env,
            user: recipe.user.clone().or(parent.user),
            workdir: recipe.workdir.clone().or(parent.workdir),
            start: recipe.start.clone().or(parent.start),
            start_keeps_awake: recipe.start_keeps_awake.unwrap_or(inherited),
            ready: parent.ready,
        }
    }
}

fn total_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}
