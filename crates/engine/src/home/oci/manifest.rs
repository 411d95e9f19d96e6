//! From an image's index, through manifests, to its configuration and its layers.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::archive::{Archive, is_sha256};
use super::{ImageConfig, LayerInfo, OciError, Result};

/// An index may point to another one, per platform. None needs more than this.
const MAX_DEPTH: usize = 4;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

/// An index has `manifests`; a manifest has `config` and `layers`.
#[derive(Debug, Deserialize)]
struct Document {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    layers: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Config {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<RunConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RunConfig {
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
}

pub(super) fn resolve(archive: &Archive<'_>) -> Result<(Vec<LayerInfo>, ImageConfig)> {
    if archive.has("oci-layout") && archive.has("index.json") {
        let index: Document = parse(&archive.document("index.json")?, "index.json")?;
        return follow(archive, index, 0);
    }
    if !archive.has("manifest.json") {
        return Err(OciError::Malformed(
            "it has neither oci-layout nor manifest.json".into(),
        ));
    }
    let mut images: Vec<Saved> = parse(&archive.document("manifest.json")?, "manifest.json")?;
    match images.len() {
        1 => saved(archive, images.remove(0)),
        0 => Err(OciError::Malformed("its manifest.json names no image".into())),
        n => Err(OciError::Several(n)),
    }
}

fn follow(archive: &Archive<'_>, document: Document, depth: usize) -> Result<(Vec<LayerInfo>, ImageConfig)> {
    if let Some(config) = document.config {
        return image(archive, &config, &document.layers);
    }
    if depth >= MAX_DEPTH {
        return Err(OciError::Malformed("its indexes are nested too deeply".into()));
    }
    let chosen = choose(archive, document.manifests)?;
    archive.blob(&chosen.digest, "manifest")?;
    let next = parse(
        &archive.document(&super::archive::blob_name(&chosen.digest)?)?,
        "manifest",
    )?;
    follow(archive, next, depth + 1)
}

/// The manifest for this machine; one that names no platform if there is no other.
fn choose(archive: &Archive<'_>, manifests: Vec<Descriptor>) -> Result<Descriptor> {
    // Build attestations lie beside the image they are about.
    let attestation = |d: &Descriptor| d.annotations.contains_key("vnd.docker.reference.type");
    let images: Vec<Descriptor> = manifests.into_iter().filter(|d| !attestation(d)).collect();
    let found = images
        .iter()
        .filter_map(|d| d.platform.as_ref())
        .map(platform_name)
        .collect::<Vec<_>>();
    let (mut fitting, rest): (Vec<_>, Vec<_>) = images.into_iter().partition(|d| {
        d.platform
            .as_ref()
            .is_some_and(|p| p.os == "linux" && p.architecture == architecture())
    });
    if fitting.is_empty() {
        fitting = rest.into_iter().filter(|d| d.platform.is_none()).collect();
    }
    // One image under several tags, or variants of one architecture of which only one was saved.
    fitting.dedup_by(|a, b| a.digest == b.digest);
    if fitting.len() > 1 {
        fitting.retain(|d| super::archive::blob_name(&d.digest).is_ok_and(|name| archive.has(&name)));
    }
    match fitting.len() {
        1 => Ok(fitting.remove(0)),
        0 if found.is_empty() => Err(OciError::Malformed("its index names no image".into())),
        0 => Err(OciError::Platform {
            wanted: architecture(),
            found: found.join(", "),
        }),
        n => Err(OciError::Several(n)),
    }
}

fn image(
    archive: &Archive<'_>,
    config: &Descriptor,
    layers: &[Descriptor],
) -> Result<(Vec<LayerInfo>, ImageConfig)> {
    archive.blob(&config.digest, "configuration")?;
    let config = configuration(&archive.document(&super::archive::blob_name(&config.digest)?)?)?;
    let mut infos = Vec::with_capacity(layers.len());
    for (n, layer) in layers.iter().enumerate() {
        if !is_tar(&layer.media_type) {
            return Err(OciError::Malformed(format!(
                "its layers are of the unknown type {}",
                layer.media_type
            )));
        }
        let (offset, size) = archive.blob(&layer.digest, &format!("layer {}", n + 1))?;
        infos.push(LayerInfo {
            offset,
            size,
            media_type: layer.media_type.clone(),
        });
    }
    Ok((infos, config))
}

fn saved(archive: &Archive<'_>, image: Saved) -> Result<(Vec<LayerInfo>, ImageConfig)> {
    let check = |name: &str, what: String| match name.strip_prefix("blobs/sha256/") {
        Some(hex) if is_sha256(hex) => archive.blob(&format!("sha256:{hex}"), &what),
        _ => archive.locate(name),
    };
    check(&image.config, "configuration".into())?;
    let config = configuration(&archive.document(&image.config)?)?;
    let mut infos = Vec::with_capacity(image.layers.len());
    for (n, name) in image.layers.iter().enumerate() {
        let (offset, size) = check(name, format!("layer {}", n + 1))?;
        let media_type = "application/vnd.docker.image.rootfs.diff.tar".to_owned();
        infos.push(LayerInfo {
            offset,
            size,
            media_type,
        });
    }
    Ok((infos, config))
}

fn configuration(json: &[u8]) -> Result<ImageConfig> {
    let config: Config = parse(json, "configuration")?;
    let fits = |value: &str, wanted: &str| value.is_empty() || value == wanted;
    if !fits(&config.os, "linux") || !fits(&config.architecture, architecture()) {
        let found = platform_name(&Platform {
            architecture: config.architecture,
            os: config.os,
        });
        return Err(OciError::Platform {
            wanted: architecture(),
            found,
        });
    }
    let run = config.config.unwrap_or_default();
    let named = |value: Option<String>| value.filter(|v| !v.is_empty());
    Ok(ImageConfig {
        env: run
            .env
            .unwrap_or_default()
            .iter()
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect(),
        user: named(run.user),
        workdir: named(run.working_dir),
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
    })
}

/// Plain or compressed with gzip or zstd, of either vendor; encrypted and foreign layers are not.
fn is_tar(media_type: &str) -> bool {
    matches!(
        media_type,
        "application/vnd.oci.image.layer.v1.tar"
            | "application/vnd.oci.image.layer.v1.tar+gzip"
            | "application/vnd.oci.image.layer.v1.tar+zstd"
            | "application/vnd.docker.image.rootfs.diff.tar"
            | "application/vnd.docker.image.rootfs.diff.tar.gzip"
            | "application/vnd.docker.image.rootfs.diff.tar.zstd"
    )
}

/// This machine's architecture, as images name it.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

fn platform_name(platform: &Platform) -> String {
    let or = |s: &str| {
        if s.is_empty() {
            "unknown".to_owned()
        } else {
            s.to_owned()
        }
    };
    format!("{}/{}", or(&platform.os), or(&platform.architecture))
}

fn parse<T: DeserializeOwned>(json: &[u8], what: &str) -> Result<T> {
    serde_json::from_slice(json)
        .map_err(|e| OciError::Malformed(format!("its {what} cannot be understood: {e}")))
}
