//! Image archives as docker and skopeo write them, made by hand.

use std::fs::File;
use std::io::{Read, Seek, Write};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::manifest::architecture;
use super::{Image, OciError, Result, Upload, analyse};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

#[derive(Default)]
struct Tar(Vec<(String, Vec<u8>)>);

impl Tar {
    fn add(&mut self, name: &str, content: impl Into<Vec<u8>>) {
        self.0.push((name.to_owned(), content.into()));
    }

    fn json(&mut self, name: &str, content: &Value) {
        self.add(name, serde_json::to_vec(content).unwrap());
    }

    fn blob(&mut self, content: impl Into<Vec<u8>>) -> String {
        let content = content.into();
        let hex: String = Sha256::digest(&content)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        self.add(&format!("blobs/sha256/{hex}"), content);
        format!("sha256:{hex}")
    }

    fn blob_json(&mut self, content: &Value) -> String {
        self.blob(serde_json::to_vec(content).unwrap())
    }

    /// An image with one layer for each of `layers`; gives the digest of its manifest.
    fn image(&mut self, layers: &[&str], arch: &str) -> String {
        let config = self.blob_json(&config(arch));
        let layers: Vec<Value> = layers
            .iter()
            .map(|l| json!({"mediaType": LAYER, "digest": self.blob(*l)}))
            .collect();
        self.blob_json(&json!({"config": {"mediaType": "x", "digest": config}, "layers": layers}))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (name, content) in &self.0 {
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, content.as_slice()).unwrap();
        }
        tar.into_inner().unwrap()
    }

    fn layout(&mut self, index: &Value) {
        self.json("oci-layout", &json!({"imageLayoutVersion": "1.0.0"}));
        self.json("index.json", index);
    }
}

fn config(arch: &str) -> Value {
    json!({
        "os": "linux", "architecture": arch,
        "config": {
            "Env": ["PATH=/bin", "A=b=c"], "User": "app", "WorkingDir": "/srv",
            "Entrypoint": ["/entry"], "Cmd": null,
        },
    })
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    file
}

fn analyse_bytes(bytes: &[u8]) -> Result<Upload> {
    analyse(file(bytes), &std::env::temp_dir(), 1 << 30)
}

fn image(bytes: &[u8]) -> Image {
    match analyse_bytes(bytes).unwrap() {
        Upload::Image(image) => image,
        Upload::Rootfs(_) => panic!("taken for a root filesystem"),
    }
}

fn layers(image: &Image) -> Vec<String> {
    let read = |n| {
        let mut text = String::new();
        image
            .layer(n)
            .unwrap()
            .reader()
            .read_to_string(&mut text)
            .unwrap();
        text
    };
    (0..image.layers.len()).map(read).collect()
}

#[test]
fn an_image_layout_gives_its_layers_and_how_it_wants_to_be_run() {
    let mut tar = Tar::default();
    let manifest = tar.image(&["one", "two"], architecture());
    tar.layout(&json!({"manifests": [{"mediaType": MANIFEST, "digest": manifest}]}));
    let image = image(&tar.bytes());
    assert_eq!(layers(&image), ["one", "two"]);
    assert_eq!(image.config.env["A"], "b=c");
    assert_eq!(image.config.user.as_deref(), Some("app"));
    assert_eq!(image.config.workdir.as_deref(), Some("/srv"));
    assert_eq!(image.config.entrypoint, ["/entry"]);
    assert!(image.config.cmd.is_empty());
}

#[test]
fn of_several_platforms_this_machines_is_taken_through_nested_indexes() {
    let mut tar = Tar::default();
    let ours = tar.image(&["ours"], architecture());
    let other = tar.image(&["other"], "s390x");
    let attestation = tar.image(&["attestation"], "unknown");
    let inner = tar.blob_json(&json!({"mediaType": INDEX, "manifests": [
        {"digest": other, "platform": {"os": "linux", "architecture": "s390x"}},
        {"digest": ours, "platform": {"os": "linux", "architecture": architecture()}},
        {"digest": attestation, "platform": {"os": "unknown", "architecture": "unknown"},
         "annotations": {"vnd.docker.reference.type": "attestation-manifest"}},
    ]}));
    tar.layout(&json!({"manifests": [{"mediaType": INDEX, "digest": inner}]}));
    assert_eq!(layers(&image(&tar.bytes())), ["ours"]);
}

#[test]
fn an_image_for_another_platform_is_refused_by_name() {
    let mut tar = Tar::default();
    let other = tar.image(&["other"], "s390x");
    let platform = json!({"os": "linux", "architecture": "s390x"});
    tar.layout(&json!({"manifests": [{"digest": other, "platform": platform}]}));
    let refused = analyse_bytes(&tar.bytes()).unwrap_err();
    assert!(refused.to_string().contains("it is for linux/s390x"), "{refused}");

    // The configuration is asked when the index says nothing.
    let mut tar = Tar::default();
    let other = tar.image(&["other"], "s390x");
    tar.layout(&json!({"manifests": [{"digest": other}]}));
    assert!(matches!(
        analyse_bytes(&tar.bytes()),
        Err(OciError::Platform { .. })
    ));
}

#[test]
fn a_blob_that_is_not_what_its_digest_says_is_refused() {
    let mut tar = Tar::default();
    let manifest = tar.image(&["honest"], architecture());
    tar.layout(&json!({"manifests": [{"digest": manifest}]}));
    let layer = tar
        .0
        .iter_mut()
        .find(|(_, content)| content == b"honest")
        .unwrap();
    layer.1 = b"forged".to_vec();
    let refused = analyse_bytes(&tar.bytes()).unwrap_err();
    assert!(
        matches!(&refused, OciError::Digest { what, .. } if what == "layer 1"),
        "{refused}"
    );
}

#[test]
fn what_docker_save_writes_is_understood_with_links_for_shared_layers() {
    let (a, b) = ("a".repeat(64), "b".repeat(64));
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |name: &str, content: &[u8], link: Option<&str>| {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        match link {
            None => builder.append_data(&mut header, name, content).unwrap(),
            Some(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                builder.append_link(&mut header, name, target).unwrap();
            }
        }
    };
    add(&format!("{a}/layer.tar"), b"lower", None);
    add(&format!("{b}/layer.tar"), b"", Some(&format!("../{a}/layer.tar")));
    add(
        &format!("{a}.json"),
        &serde_json::to_vec(&config(architecture())).unwrap(),
        None,
    );
    add("repositories", b"{}", None);
    let manifest = json!([{"Config": format!("{a}.json"), "RepoTags": ["x:1"],
        "Layers": [format!("{a}/layer.tar"), format!("{b}/layer.tar")]}]);
    add("manifest.json", &serde_json::to_vec(&manifest).unwrap(), None);
    let bytes = builder.into_inner().unwrap();
    assert_eq!(layers(&image(&bytes)), ["lower", "lower"]);

    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&bytes).unwrap();
    let packed = gzip.finish().unwrap();
    assert_eq!(layers(&image(&packed)), ["lower", "lower"]);
    let refused = analyse(file(&packed), &std::env::temp_dir(), 1000).unwrap_err();
    assert!(matches!(refused, OciError::NoRoom { room: 1000 }), "{refused}");
}

#[test]
fn two_images_in_one_archive_are_refused() {
    let mut tar = Tar::default();
    tar.json(
        "manifest.json",
        &json!([{"Config": "a", "Layers": []}, {"Config": "b", "Layers": []}]),
    );
    assert!(matches!(analyse_bytes(&tar.bytes()), Err(OciError::Several(2))));
}

#[test]
fn anything_else_is_a_root_filesystem_plain_or_compressed() {
    let mut tar = Tar::default();
    tar.add("./manifest.json", "not an image's");
    tar.add("./bin/sh", "sh");
    let plain = tar.bytes();
    let packed = zstd::encode_all(plain.as_slice(), 1).unwrap();
    for bytes in [plain, packed] {
        let Upload::Rootfs(layer) = analyse_bytes(&bytes).unwrap() else {
            panic!("taken for an image")
        };
        let mut read = Vec::new();
        layer.reader().read_to_end(&mut read).unwrap();
        assert_eq!(read, bytes);
    }
}

#[test]
fn what_is_no_archive_or_misses_parts_is_refused() {
    for bytes in [&b""[..], &b"hello, this is not a tar archive"[..], &[0xff; 2048]] {
        let refused = analyse_bytes(bytes).unwrap_err();
        assert!(matches!(refused, OciError::NotAnArchive(_)), "{refused}");
    }
    let missing = format!("sha256:{}", "0".repeat(64));
    for digest in [missing.as_str(), "sha256:../../etc/passwd", "md5:1"] {
        let mut tar = Tar::default();
        tar.layout(&json!({"manifests": [{"digest": digest}]}));
        assert!(
            matches!(analyse_bytes(&tar.bytes()), Err(OciError::Malformed(_))),
            "{digest}"
        );
    }
    let mut circle = Tar::default();
    let index = circle.blob_json(&json!({"manifests": []}));
    circle.layout(&json!({"manifests": [{"digest": index}]}));
    assert!(matches!(
        analyse_bytes(&circle.bytes()),
        Err(OciError::Malformed(_))
    ));
}
