//! From an upload to a template.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::stream;

use super::super::ImportOptions;
use super::*;

impl World {
    async fn import(&self, upload: &[u8]) -> Result<mpsc::Receiver<Progress>, TemplateError> {
        let chunks: Vec<Result<Bytes, Infallible>> = upload
            .chunks(700)
            .map(|c| Ok(Bytes::copy_from_slice(c)))
            .collect();
        self.templates
            .import(
                &workspace(),
                "image",
                ImportOptions::default(),
                stream::iter(chunks),
            )
            .await
    }
}

fn tar(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, content.as_bytes()).unwrap();
    }
    tar.into_inner().unwrap()
}

fn saved_image(layers: usize) -> Vec<u8> {
    let names: Vec<String> = (0..layers).map(|n| format!("{n:064}/layer.tar")).collect();
    let manifest = serde_json::json!([{"Config": format!("{}.json", "c".repeat(64)), "Layers": names}]);
    let config = r#"{"config": {"Env": ["A=1"], "User": "app", "WorkingDir": "/srv", "Cmd": ["serve"]}}"#;
    let (manifest, config_name) = (manifest.to_string(), format!("{}.json", "c".repeat(64)));
    let mut entries: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "a layer")).collect();
    entries.push((&config_name, config));
    entries.push(("manifest.json", &manifest));
    tar(&entries)
}

#[tokio::test]
async fn a_root_filesystem_becomes_a_template_of_one_layer() {
    let world = World::new().await;
    let progress = collect(world.import(&tar(&[("bin/sh", "sh")])).await.unwrap()).await;
    assert_eq!(
        titles(&progress),
        ["1/2 Unpack layer 1 of 1", "2/2 Seal the template"]
    );
    let template = world.templates.get(&workspace(), "image").await.unwrap();
    assert_eq!(template.recipe_hash, None);
    world.assert_clean(&[&template.id]).await;
}

#[tokio::test]
async fn an_image_gives_its_layers_and_its_defaults() {
    let world = World::new().await;
    let progress = collect(world.import(&saved_image(3)).await.unwrap()).await;
    assert_eq!(titles(&progress).len(), 4);
    let template = world.templates.get(&workspace(), "image").await.unwrap();
    assert_eq!(
        (template.user.as_deref(), template.workdir.as_deref()),
        (Some("app"), Some("/srv"))
    );
    assert_eq!(template.env["A"], "1");
    assert_eq!(template.start, None);
    assert_eq!(
        std::fs::read_dir(world.dir.path().join("tmp")).unwrap().count(),
        0
    );
}

#[tokio::test]
async fn an_upload_that_is_no_archive_or_breaks_off_is_refused_and_leaves_nothing() {
    let world = World::new().await;
    let refused = world.import(b"hello").await.unwrap_err();
    assert_eq!(refused.code(), "invalid_argument");
    assert!(refused.body().hint.unwrap().contains("docker save"));

    let chunks = vec![Ok(Bytes::from_static(b"abc")), Err(std::io::Error::other("gone"))];
    let broken = world
        .templates
        .import(
            &workspace(),
            "image",
            ImportOptions::default(),
            stream::iter(chunks),
        )
        .await;
    assert_eq!(broken.unwrap_err().code(), "invalid_argument");

    let huge = ImportOptions {
        length: Some(u64::MAX),
        ..ImportOptions::default()
    };
    let none = stream::empty::<Result<Bytes, Infallible>>();
    let refused = world
        .templates
        .import(&workspace(), "image", huge, none)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), "no_space");
    world.assert_clean(&[]).await;
    assert!(world.templates.claim(&workspace(), "image").is_ok());
}
