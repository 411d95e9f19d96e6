//! Archives made by hand, honest and hostile, on real directories. They set owners, so they need root.

mod archives;
mod hostile;
mod model;
mod whiteouts;
