//! What a memory image consists of, so that a damaged one is refused.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::MemoryImage;

const NAME: &str = "manifest.json";
const FORMAT: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: u32,
    pub(crate) guest_hash: String,
    pub(crate) uid_base: u32,
    criu: String,
    kernel: String,
    files: BTreeMap<String, FileEntry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FileEntry {
    size: u64,
    blake3: String,
}

impl Manifest {
    /// Describes and syncs the image in `directory`, and gives it its final name `image`.
    pub(crate) fn commit(
        directory: &Path,
        image: &Path,
        guest_hash: &str,
        uid_base: u32,
        criu: &str,
    ) -> io::Result<MemoryImage> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let file = File::open(entry.path())?;
            let hash = blake3::Hasher::new().update_mmap(entry.path())?.finalize();
            file.sync_all()?;
            let name = entry.file_name().to_string_lossy().into_owned();
            files.insert(
                name,
                FileEntry {
                    size: file.metadata()?.len(),
                    blake3: hash.to_hex().to_string(),
                },
            );
        }
        let size = files.values().map(|file| file.size).sum();
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        let manifest = Self {
            format: FORMAT,
            guest_hash: guest_hash.to_owned(),
            uid_base,
            criu: criu.to_owned(),
            kernel,
            files,
        };
        let mut file = File::create_new(directory.join(NAME))?;
        file.write_all(&serde_json::to_vec_pretty(&manifest)?)?;
        file.sync_all()?;
        File::open(directory)?.sync_all()?;
        fs::rename(directory, image)?;
        if let Some(parent) = image.parent() {
            File::open(parent)?.sync_all()?;
        }
        Ok(MemoryImage {
            size,
            guest_hash: manifest.guest_hash,
        })
    }

    /// Reads the manifest and compares every file with it. The error says what is wrong, in words.
    pub(crate) fn verify(image: &Path) -> Result<Self, String> {
        let text = fs::read(image.join(NAME)).map_err(|e| format!("its manifest cannot be read: {e}"))?;
        let manifest: Self =
            serde_json::from_slice(&text).map_err(|e| format!("its manifest makes no sense: {e}"))?;
        if manifest.format != FORMAT {
            return Err(format!(
                "it is of format {}, and this dorm knows {FORMAT}",
                manifest.format
            ));
        }
        for (name, entry) in &manifest.files {
            let path = image.join(name);
            let found = fs::metadata(&path)
                .map_err(|e| format!("{name} cannot be read: {e}"))?
                .len();
            if found != entry.size {
                return Err(format!("{name} has {found} bytes and should have {}", entry.size));
            }
            let hash = blake3::Hasher::new()
                .update_mmap(&path)
                .map_err(|e| format!("{name} cannot be read: {e}"))?
                .finalize();
            if hash.to_hex().as_str() != entry.blake3 {
                return Err(format!("the checksum of {name} is wrong"));
            }
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> (tempfile::TempDir, std::path::PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let unfinished = root.path().join("new");
        fs::create_dir(&unfinished).unwrap();
        fs::write(unfinished.join("pages-1.img"), vec![7; 100_000]).unwrap();
        fs::write(unfinished.join("core-1.img"), b"core").unwrap();
        let image = root.path().join("image");
        let made = Manifest::commit(&unfinished, &image, "guest", 5, "4.2").unwrap();
        assert_eq!(made.size, 100_004);
        (root, image)
    }

    #[test]
    fn a_whole_image_is_accepted() {
        let (_root, image) = image();
        assert_eq!(Manifest::verify(&image).unwrap().guest_hash, "guest");
    }

    #[test]
    fn a_flipped_bit_is_noticed() {
        let (_root, image) = image();
        let mut bytes = fs::read(image.join("pages-1.img")).unwrap();
        bytes[50_000] ^= 1;
        fs::write(image.join("pages-1.img"), bytes).unwrap();
        assert!(
            Manifest::verify(&image)
                .unwrap_err()
                .contains("checksum of pages-1.img")
        );
    }

    #[test]
    fn a_truncated_or_missing_file_is_noticed() {
        let (_root, image) = image();
        fs::write(image.join("core-1.img"), b"co").unwrap();
        assert!(Manifest::verify(&image).unwrap_err().contains("2 bytes"));
        fs::remove_file(image.join("core-1.img")).unwrap();
        assert!(Manifest::verify(&image).unwrap_err().contains("core-1.img"));
    }
}
