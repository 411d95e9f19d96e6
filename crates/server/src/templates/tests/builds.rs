//! From a recipe to a template, and every way in which that may end.

use super::*;

#[tokio::test]
async fn a_bootstrapped_template_without_commands_needs_no_box() {
    let world = World::new().await;
    let progress = collect(world.start("base", debian()).await.unwrap()).await;
    assert_eq!(
        titles(&progress),
        ["1/2 Bootstrap Debian bookworm", "2/2 Seal the template"]
    );
    assert_eq!(world.engine.starts(), 0);
    let template = world.templates.get(&workspace(), "base").await.unwrap();
    world.assert_clean(&[&template.id]).await;
    let log = world.templates.log(&workspace(), "base").await.unwrap();
    assert_eq!(
        log,
        "[1/2] Bootstrap Debian bookworm\nbootstrapped bookworm\n[2/2] Seal the template\ndone\n"
    );
}

#[tokio::test]
async fn the_steps_of_a_recipe_are_done_in_order_as_root_of_a_box() {
    let world = World::new().await;
    let recipe = Recipe {
        files: vec![RecipeFile {
            mode: Some("0755".into()),
            owner: Some("user".into()),
            ..file("/opt/a b", "aGVsbG8=")
        }],
        run: vec!["make".into(), "make install".into()],
        env: [("A".to_owned(), "1".to_owned())].into(),
        user: Some("user".into()),
        workdir: Some("/srv".into()),
        start: Some("serve".into()),
        ..debian()
    };
    let progress = collect(world.start("app", recipe).await.unwrap()).await;
    assert_eq!(
        titles(&progress),
        [
            "1/8 Bootstrap Debian bookworm",
            "2/8 Start a box to build in",
            "3/8 Make sure of user user",
            "4/8 Write /opt/a b",
            "5/8 Run make",
            "6/8 Run make install",
            "7/8 Clean up",
            "8/8 Seal the template",
        ]
    );
    world.guests.asked(|asked| {
        assert_eq!(
            asked.files,
            [("username=root&path=/opt/a%20b".to_owned(), b"hello".to_vec())]
        );
        assert!(
            asked.runs[1].ends_with("sh /opt/a b user 0755"),
            "{}",
            asked.runs[1]
        );
        assert_eq!(asked.runs[2..4], ["-e -c make sh", "-e -c make install sh"]);
        assert!(
            asked
                .requests
                .iter()
                .all(|r| r["user"] == "root" && r["process"]["cmd"] == "/bin/sh")
        );
    });
    let spec = world.engine.last_spec().unwrap();
    assert!(spec.slot >= 100, "a build takes no agent's slot");
    assert_eq!(spec.uid_base, 1_000_000 + spec.slot * 65_536);
    assert_eq!(spec.boot.env["A"], "1");
    assert_eq!(spec.boot.start_command, None);

    let template = world.templates.get(&workspace(), "app").await.unwrap();
    assert_eq!(template.user.as_deref(), Some("user"));
    assert_eq!(
        (template.workdir.as_deref(), template.start.as_deref()),
        (Some("/srv"), Some("serve"))
    );
    world.assert_clean(&[&template.id]).await;
}

#[tokio::test]
async fn a_template_from_another_copies_it_and_inherits_its_defaults() {
    let world = World::new().await;
    let base = Recipe {
        user: Some("user".into()),
        env: [("A".into(), "1".into())].into(),
        ..debian()
    };
    let (base, _) = world.build("base", base).await;
    let recipe = Recipe {
        from: "base".into(),
        apt: vec!["vim".into()],
        env: [("B".into(), "2".into())].into(),
        ..Recipe::default()
    };
    let (child, cached) = world.build("child", recipe.clone()).await;
    assert!(!cached);
    assert_eq!(child.user.as_deref(), Some("user"));
    assert_eq!(child.env.len(), 2);
    assert!(world.guests.asked(|asked| {
        asked
            .runs
            .iter()
            .any(|r| r.contains("apt-get") && r.ends_with("sh vim"))
    }));

    // Another parent under the same name makes another template.
    assert!(world.build("child", recipe.clone()).await.1);
    let (rebuilt, _) = world
        .build(
            "base",
            Recipe {
                run: vec!["true".into()],
                ..debian()
            },
        )
        .await;
    assert_ne!(rebuilt.id, base.id);
    let (other, cached) = world.build("child", recipe).await;
    assert!(!cached);
    assert_ne!(other.recipe_hash, child.recipe_hash);
    world.assert_clean(&[&rebuilt.id, &other.id]).await;
}

#[tokio::test]
async fn the_same_recipe_is_not_built_twice_unless_forced() {
    let world = World::new().await;
    let (first, cached) = world.build("base", debian()).await;
    assert!(!cached);
    assert!(world.build("base", debian()).await.1);
    let forced = BuildTemplate {
        recipe: debian(),
        force: true,
    };
    let progress = world.templates.build(&workspace(), "base", forced).await.unwrap();
    let (second, cached) = finished(progress).await.unwrap();
    assert!(!cached);
    assert_ne!(second.id, first.id);
    world.assert_clean(&[&second.id]).await;
}

#[tokio::test]
async fn a_template_in_the_cache_is_imported_by_another_data_directory() {
    let cache = tempfile::tempdir().unwrap();
    let directory = cache.path().join("templates");
    let with_cache = || {
        World::with(
            |c| c.template_cache = Some(directory.clone()),
            |_| Some((String::new(), 0)),
        )
    };
    let first = with_cache().await;
    let (template, cached) = first.build("base", debian()).await;
    assert!(!cached);
    let mut files: Vec<_> = std::fs::read_dir(&directory)
        .unwrap()
        .map(|f| f.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let hash = template.recipe_hash.unwrap();
    assert_eq!(files, [format!("{hash}.size"), format!("{hash}.tmpl")]);
    std::fs::write(directory.join(&files[0]), "12345").unwrap();

    let second = with_cache().await;
    let progress = collect(second.start("base", debian()).await.unwrap()).await;
    assert_eq!(titles(&progress), ["1/1 Take the template from the cache"]);
    assert!(matches!(
        progress.last(),
        Some(Progress::Done { cached: true, template }) if template.size == 12345
    ));
}

#[tokio::test]
async fn a_cache_that_cannot_be_written_is_a_warning_only() {
    let blocked = tempfile::NamedTempFile::new().unwrap();
    let cache = blocked.path().join("cache");
    let world = World::with(|c| c.template_cache = Some(cache), |_| Some((String::new(), 0))).await;
    let progress = collect(world.start("base", debian()).await.unwrap()).await;
    assert!(matches!(
        progress.last(),
        Some(Progress::Done { cached: false, .. })
    ));
    let warned = |p: &Progress| matches!(p, Progress::Log { line } if line.contains("not kept in the cache"));
    assert!(progress.iter().any(warned));
}

#[tokio::test]
async fn the_hosts_certificates_are_trusted_and_named_in_the_environment() {
    let bundle = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        bundle.path(),
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    let path = bundle.path().to_owned();
    let world = World::with(|c| c.host_ca = Some(path), |_| Some((String::new(), 0))).await;
    let (template, _) = world.build("base", debian()).await;
    assert_eq!(
        template.env["SSL_CERT_FILE"],
        "/etc/ssl/certs/ca-certificates.crt"
    );
    world.guests.asked(|asked| {
        assert!(
            asked.files[0]
                .0
                .ends_with("path=/usr/local/share/ca-certificates/dorm/host.pem")
        );
        assert!(asked.runs[1].contains("update-ca-certificates"));
    });
    std::fs::write(bundle.path(), "none").unwrap();
    let (other, cached) = world.build("base", debian()).await;
    assert!(!cached);
    assert_ne!(other.recipe_hash, template.recipe_hash);
}

#[tokio::test]
async fn a_command_that_fails_is_reported_with_its_last_lines_and_leaves_nothing() {
    let answer = |run: &str| {
        Some(if run.contains("broken") {
            ("one\ntwo\n".into(), 3)
        } else {
            (String::new(), 0)
        })
    };
    let world = World::with(|_| {}, answer).await;
    let (before, _) = world.build("app", debian()).await;
    let error = world
        .fail(
            "app",
            Recipe {
                run: vec!["fine".into(), "broken".into()],
                ..debian()
            },
        )
        .await;
    assert_eq!(error.code, "invalid_argument");
    assert_eq!(
        error.message,
        "step 4 of 6 (Run broken) failed: a command failed: exit code 3"
    );
    assert_eq!(error.hint.as_deref(), Some("its last lines:\none\ntwo"));
    // The name means what it meant before.
    assert_eq!(
        world.templates.get(&workspace(), "app").await.unwrap().id,
        before.id
    );
    world.assert_clean(&[&before.id]).await;
    assert!(
        world
            .templates
            .log(&workspace(), "app")
            .await
            .unwrap()
            .contains("\ntwo\nerror: step 4 of 6")
    );
}

#[tokio::test]
async fn a_box_that_does_not_start_or_dies_fails_the_build_and_leaves_nothing() {
    let world = World::with(|_| {}, |_| None).await;
    let recipe = Recipe {
        run: vec!["sleep".into()],
        ..debian()
    };
    world.engine.fail_next_start("no address left");
    let error = world.fail("app", recipe.clone()).await;
    assert!(error.message.contains("no address left"), "{}", error.message);
    world.assert_clean(&[]).await;

    let mut progress = world.start("app", recipe).await.unwrap();
    until_step(&mut progress, "Run sleep").await;
    world.engine.kill(
        &world.engine.last_spec().unwrap().id,
        "process 1 was killed: out of memory",
    );
    let error = finished(progress).await.unwrap_err();
    assert!(error.message.contains("out of memory"), "{}", error.message);
    world.assert_clean(&[]).await;
}

#[tokio::test]
async fn a_client_that_goes_away_ends_the_build() {
    let world = World::with(|_| {}, |_| None).await;
    let recipe = Recipe {
        run: vec!["sleep".into()],
        ..debian()
    };
    let mut progress = world.start("app", recipe.clone()).await.unwrap();
    until_step(&mut progress, "Run sleep").await;
    let busy = world.start("app", recipe).await.unwrap_err();
    assert_eq!(busy.code(), "conflict");
    drop(progress);
    world.templates.tasks.close();
    world.templates.tasks.wait().await;
    world.assert_clean(&[]).await;
    assert!(world.templates.claim(&workspace(), "app").is_ok());
}

#[tokio::test]
async fn the_daemons_end_breaks_builds_off_and_waits_until_they_are_cleared_away() {
    let world = World::with(|_| {}, |_| None).await;
    let recipe = Recipe {
        run: vec!["sleep".into()],
        ..debian()
    };
    let progress = world.start("app", recipe.clone()).await.unwrap();
    world.templates.close().await;
    world.assert_clean(&[]).await;
    assert_eq!(finished(progress).await.unwrap_err().code, "unavailable");
    assert!(matches!(
        world.start("app", recipe).await,
        Err(TemplateError::Cancelled)
    ));
}

#[tokio::test]
async fn a_full_pool_is_said_to_be_full() {
    let world = World::new().await;
    world.homes.fill(true);
    let error = world.fail("app", debian()).await;
    assert_eq!(error.code, "no_space");
    world.assert_clean(&[]).await;
}

#[tokio::test]
async fn requests_that_cannot_be_met_are_refused_before_anything_is_made() {
    let world = World::new().await;
    let absent = Recipe {
        from: "nothing".into(),
        ..Recipe::default()
    };
    assert_eq!(world.start("app", absent).await.unwrap_err().code(), "not_found");
    assert_eq!(
        world.start("App", debian()).await.unwrap_err().code(),
        "invalid_argument"
    );
    assert_eq!(
        world.start("app", Recipe::default()).await.unwrap_err().code(),
        "invalid_argument"
    );
    assert_eq!(
        world.templates.log(&workspace(), "app").await.unwrap_err().code(),
        "not_found"
    );
    world.assert_clean(&[]).await;
}

#[tokio::test]
async fn a_template_can_be_deleted_unless_it_is_being_built_from() {
    let world = World::with(|_| {}, |run| (!run.contains("sleep")).then(|| (String::new(), 0))).await;
    let (base, _) = world.build("base", debian()).await;
    let child = Recipe {
        from: "base".into(),
        run: vec!["sleep".into()],
        ..Recipe::default()
    };
    let progress = world.start("child", child).await.unwrap();
    assert_eq!(
        world
            .templates
            .delete(&workspace(), "base")
            .await
            .unwrap_err()
            .code(),
        "conflict"
    );
    world.assert_in_use(&base.id).await;
    drop(progress);
    world.templates.tasks.close();
    world.templates.tasks.wait().await;
    world
        .templates
        .delete(&workspace(), base.id.as_str())
        .await
        .unwrap();
    world.assert_clean(&[]).await;
    assert_eq!(
        world
            .templates
            .delete(&workspace(), "base")
            .await
            .unwrap_err()
            .code(),
        "not_found"
    );
    assert!(!world.dir.path().join("logs/template-base.log").exists());
}

#[tokio::test]
async fn a_template_says_of_its_own_start_command_whether_it_keeps_agents_awake() {
    let world = World::new().await;
    let start = |from: &str, start: Option<&str>, keeps_awake| Recipe {
        from: from.into(),
        start: start.map(str::to_owned),
        start_keeps_awake: keeps_awake,
        ..Recipe::default()
    };
    for (name, recipe, expected) in [
        ("service", start("debian:bookworm", Some("serve"), None), false),
        ("work", start("debian:bookworm", Some("serve"), Some(true)), true),
        ("same", start("work", None, None), true),
        ("other", start("work", Some("another"), None), false),
        ("changed", start("work", None, Some(false)), false),
    ] {
        let (template, _) = world.build(name, recipe).await;
        assert_eq!(template.start_keeps_awake, expected, "{name}");
    }
}

async fn until_step(progress: &mut mpsc::Receiver<Progress>, wanted: &str) {
    while let Some(one) = progress.recv().await {
        if matches!(one, Progress::Step { title, .. } if title == wanted) {
            return;
        }
    }
    panic!("the build ended before {wanted:?}");
}

impl World {
    async fn assert_in_use(&self, id: &Id) {
        assert!(self.homes.templates().await.unwrap().contains(id));
        assert_eq!(
            self.templates.get(&workspace(), id.as_str()).await.unwrap().id,
            *id
        );
    }
}
