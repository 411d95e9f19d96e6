//! Files of the box, as the user of the request may see and change them.

pub(crate) mod entry;
mod inotify;
pub(crate) mod ops;
pub(crate) mod path;
pub(crate) mod service;
mod watch;
