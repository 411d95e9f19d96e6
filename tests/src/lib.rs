//! The end-to-end tests live in `e2e/`.
