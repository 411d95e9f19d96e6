//! What the machine's kernel knows of a volume: which inode has which names, and what is open.
//!
//! The kernel speaks of inodes by their numbers, and the file server wants paths. A path is put together from names, each in a folder, so
//! that a folder that moves takes with it what is in it.

use std::collections::HashMap;

use dorm_proto::volume::{File, Node, Place, REMOVED};

/// The kernel's number for the root.
pub(super) const ROOT: u64 = 1;
/// Longest chain of folders.
const DEEPEST: usize = 8192;

type Name = (u64, Box<[u8]>);

#[derive(Debug, Default)]
pub(super) struct Tree {
    volume: u8,
    known: HashMap<u64, Known>,
    names: HashMap<Name, u64>,
    open: HashMap<u64, Open>,
    /// The last handle that was given.
    handle: u64,
}

#[derive(Debug, Default)]
struct Known {
    /// How often the kernel has been told of it, and has not forgotten.
    told: u64,
    /// The last is the one that was seen last.
    names: Vec<Name>,
    handles: Vec<u64>,
    /// Its name among the removed files.
    hidden: Option<String>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    inode: u64,
    flags: u32,
}

impl Tree {
    pub(super) fn new(volume: u8) -> Self {
        Self {
            volume,
            ..Self::default()
        }
    }

    pub(super) fn node(&self, inode: u64) -> Node {
        Node {
            volume: self.volume,
            // What has no name any more is found by its handle, or not at all.
            path: self.path(inode).unwrap_or_else(|| [REMOVED, b"/", b"-"].concat()),
            inode: if inode == ROOT { 0 } else { inode },
        }
    }

    pub(super) fn place(&self, folder: u64, name: &[u8]) -> Place {
        Place {
            folder: self.node(folder),
            name: name.to_vec(),
        }
    }

    /// With the handle that is given, or one by which the file is open; one for writing, if there is one.
    pub(super) fn file(&self, inode: u64, handle: Option<u64>) -> File {
        let handles = self.known.get(&inode).map_or(&[][..], |known| &known.handles);
        let handle = handle
            .or_else(|| handles.iter().copied().find(|handle| self.writes(*handle)))
            .or_else(|| handles.first().copied());
        let flags = handle.and_then(|handle| self.open.get(&handle)).map(|o| o.flags);
        File {
            node: self.node(inode),
            handle: flags.and(handle).unwrap_or(0),
            flags: flags.unwrap_or(0),
        }
    }

    fn writes(&self, handle: u64) -> bool {
        let writes = |open: &Open| open.flags.cast_signed() & libc::O_ACCMODE != libc::O_RDONLY;
        self.open.get(&handle).is_some_and(writes)
    }

    fn path(&self, inode: u64) -> Option<Vec<u8>> {
        if inode == ROOT {
            return Some(Vec::new());
        }
        let known = self.known.get(&inode)?;
        if let Some(hidden) = &known.hidden {
            return Some([REMOVED, b"/", hidden.as_bytes()].concat());
        }
        known.names.iter().rev().find_map(|name| self.path_of(name))
    }

    fn path_of(&self, name: &Name) -> Option<Vec<u8>> {
        let mut parts = vec![&name.1[..]];
        let mut folder = name.0;
        while folder != ROOT {
            if parts.len() > DEEPEST {
                return None;
            }
            let (above, part) = self.known.get(&folder)?.names.last()?;
            parts.push(part);
            folder = *above;
        }
        parts.reverse();
        Some(parts.join(&b'/'))
    }

    /// The inode that had this name when it was last seen.
    pub(super) fn at(&self, folder: u64, name: &[u8]) -> Option<u64> {
        self.names.get(&(folder, name.into())).copied()
    }

    /// The kernel is about to be told of `inode` under this name.
    pub(super) fn tell(&mut self, folder: u64, name: &[u8], inode: u64) {
        self.call(folder, name, inode);
        self.known.entry(inode).or_default().told += 1;
    }

    fn call(&mut self, folder: u64, name: &[u8], inode: u64) {
        self.gone(folder, name);
        let name: Name = (folder, name.into());
        self.names.insert(name.clone(), inode);
        self.known.entry(inode).or_default().names.push(name);
    }

    /// There is nothing of this name any more. Gives what had it.
    pub(super) fn gone(&mut self, folder: u64, name: &[u8]) -> Option<u64> {
        let name: Name = (folder, name.into());
        let inode = self.names.remove(&name)?;
        if let Some(known) = self.known.get_mut(&inode) {
            known.names.retain(|other| *other != name);
        }
        Some(inode)
    }

    pub(super) fn hidden(&mut self, inode: u64, hidden: String) {
        if let Some(known) = self.known.get_mut(&inode) {
            known.hidden = Some(hidden);
        }
    }

    /// Whether a file must be hidden rather than lose this name: it is open, and has no other that is known.
    pub(super) fn must_hide(&self, folder: u64, name: &[u8]) -> Option<u64> {
        let inode = self.at(folder, name)?;
        let known = self.known.get(&inode)?;
        (!known.handles.is_empty() && known.names.len() == 1).then_some(inode)
    }

    pub(super) fn renamed(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), exchanged: bool) {
        let moved = self.gone(from.0, from.1);
        let replaced = self.gone(to.0, to.1);
        if let Some(moved) = moved {
            self.call(to.0, to.1, moved);
        }
        if let (true, Some(replaced)) = (exchanged, replaced) {
            self.call(from.0, from.1, replaced);
        }
    }

    /// The kernel has forgotten that it was told so often.
    pub(super) fn forget(&mut self, inode: u64, times: u64) {
        if let Some(known) = self.known.get_mut(&inode) {
            known.told = known.told.saturating_sub(times);
        }
        self.drop_if_unused(inode);
    }

    fn drop_if_unused(&mut self, inode: u64) {
        if self
            .known
            .get(&inode)
            .is_some_and(|known| known.told == 0 && known.handles.is_empty())
            && let Some(known) = self.known.remove(&inode)
        {
            for name in &known.names {
                self.names.remove(name);
            }
        }
    }

    pub(super) fn new_handle(&mut self) -> u64 {
        self.handle += 1;
        self.handle
    }

    pub(super) fn opened(&mut self, inode: u64, handle: u64, flags: u32) {
        self.open.insert(handle, Open { inode, flags });
        self.known.entry(inode).or_default().handles.push(handle);
    }

    /// The handle is closed. Gives the hidden name of the file if that can be removed now.
    pub(super) fn closed(&mut self, handle: u64) -> Option<String> {
        let open = self.open.remove(&handle)?;
        let known = self.known.get_mut(&open.inode)?;
        known.handles.retain(|other| *other != handle);
        let hidden = match known.handles.is_empty() {
            true => known.hidden.take(),
            false => None,
        };
        self.drop_if_unused(open.inode);
        hidden
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(tree: &Tree, inode: u64) -> String {
        String::from_utf8(tree.node(inode).path).unwrap()
    }

    fn grown() -> Tree {
        let mut tree = Tree::new(0);
        tree.tell(ROOT, b"a", 300);
        tree.tell(300, b"b", 301);
        tree.tell(301, b"file", 302);
        tree
    }

    #[test]
    fn a_folder_that_moves_takes_with_it_what_is_in_it() {
        let mut tree = grown();
        assert_eq!(path(&tree, 302), "a/b/file");
        assert_eq!(tree.node(302).inode, 302);
        assert_eq!((path(&tree, ROOT), tree.node(ROOT).inode), (String::new(), 0));
        tree.renamed((300, b"b"), (ROOT, b"c"), false);
        assert_eq!(path(&tree, 302), "c/file");
        tree.tell(ROOT, b"d", 303);
        tree.renamed((ROOT, b"c"), (ROOT, b"d"), true);
        assert_eq!(
            (path(&tree, 302), path(&tree, 303)),
            ("d/file".into(), "c".into())
        );
    }

    #[test]
    fn a_file_with_two_names_is_found_by_the_other_when_one_is_gone() {
        let mut tree = grown();
        tree.tell(ROOT, b"link", 302);
        assert_eq!(path(&tree, 302), "link");
        assert_eq!(tree.gone(ROOT, b"link"), Some(302));
        assert_eq!(path(&tree, 302), "a/b/file");
        tree.gone(301, b"file");
        assert!(path(&tree, 302).starts_with(".dorm-removed/"), "it has no name");
    }

    #[test]
    fn a_name_that_another_file_has_got_is_no_longer_that_of_the_first() {
        let mut tree = grown();
        tree.tell(301, b"file", 400);
        assert_eq!(path(&tree, 400), "a/b/file");
        assert_ne!(path(&tree, 302), "a/b/file");
        assert_eq!(tree.at(301, b"file"), Some(400));
    }

    #[test]
    fn an_open_file_is_hidden_until_its_last_handle_is_closed() {
        let mut tree = grown();
        assert_eq!(tree.must_hide(301, b"file"), None, "nobody has it open");
        let (one, two) = (tree.new_handle(), tree.new_handle());
        tree.opened(302, one, libc::O_RDONLY.cast_unsigned());
        tree.opened(302, two, libc::O_RDWR.cast_unsigned());
        assert_eq!(tree.file(302, None).handle, two, "one that writes");
        assert_eq!(tree.file(302, Some(one)).handle, one);
        assert_eq!(tree.must_hide(301, b"file"), Some(302));
        tree.gone(301, b"file");
        tree.hidden(302, "agent-12e".into());
        assert_eq!(path(&tree, 302), ".dorm-removed/agent-12e");
        assert_eq!(tree.closed(two), None);
        tree.forget(302, 1);
        assert_eq!(tree.closed(one), Some("agent-12e".into()));
        assert!(!tree.known.contains_key(&302));
        assert_eq!(tree.closed(one), None);
    }

    #[test]
    fn what_the_kernel_forgets_takes_no_memory() {
        let mut tree = grown();
        tree.tell(301, b"file", 302);
        tree.forget(302, 1);
        assert_eq!(path(&tree, 302), "a/b/file");
        tree.forget(302, 1);
        tree.forget(301, 1);
        tree.forget(300, 1);
        assert!(tree.known.is_empty() && tree.names.is_empty());
        // More than it was told.
        tree.forget(302, 5);
    }
}
