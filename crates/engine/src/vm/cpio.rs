//! The archive that a kernel takes its first files from: cpio in its "newc" form.

/// Collects files. Folders come before what is in them.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

impl Archive {
    pub(crate) fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER, &[]);
    }

    pub(crate) fn file(&mut self, name: &str, contents: &[u8]) {
        self.entry(name, PROGRAM, contents);
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let number = |length: usize| u32::try_from(length).expect("files of a kernel are small");
        // inode, mode, owner, group, links, time, size, four device numbers, length of the name, checksum
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            number(contents.len()),
            0,
            0,
            0,
            0,
            number(name.len() + 1),
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(contents);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_the_form_that_the_kernel_reads() {
        let mut archive = Archive::default();
        archive.folder("modules");
        archive.file("init", b"abcde");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(bytes.len() % 4, 0);
        assert!(text.starts_with("07070100000001000041ed"), "{text}");
        // 110 bytes of header and the name are filled up to a multiple of four.
        let second = 110 + "modules".len() + 1 + 2;
        assert_eq!(&bytes[second..second + 6], b"070701");
        let contents = second + 116;
        assert_eq!(&bytes[contents..contents + 8], b"abcde\0\0\0");
        assert!(text.contains("TRAILER!!!"));
    }
}
