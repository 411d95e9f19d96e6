//! The tests' own order.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::harness;

harness::tests![every_file_of_tests_is_registered];

fn every_file_of_tests_is_registered() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e");
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        files.extend(name.strip_suffix(".rs").filter(|name| *name != "main").map(str::to_owned));
    }
    let registered: BTreeSet<String> = crate::features().into_iter().map(|(name, _)| name.to_owned()).collect();
    ensure!(files == registered, "files: {files:?}\nregistered: {registered:?}");
    Ok(())
}
