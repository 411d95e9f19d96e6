//! Builds the guest as a static program for this target, and tells `guest_binary.rs` where it lies.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let workspace = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../..");
    let target = env::var("TARGET").expect("cargo sets TARGET");
    for path in [
        "crates/guest/src",
        "crates/guest/Cargo.toml",
        "proto",
        "Cargo.toml",
    ] {
        println!("cargo::rerun-if-changed={}", workspace.join(path).display());
    }

    // A target directory of its own: the outer cargo holds the lock of the usual one.
    let target_dir = workspace.join("target/guest");
    let rustflags = format!(
        "CARGO_TARGET_{}_RUSTFLAGS",
        target.to_uppercase().replace('-', "_")
    );
    let status = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"))
        .args([
            "build",
            "--quiet",
            "--package",
            "dorm-guest",
            "--profile",
            "guest",
            "--target",
            &target,
        ])
        .arg("--target-dir")
        .arg(&target_dir)
        .current_dir(&workspace)
        .env(rustflags, "-C target-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the guest could not be built");

    let embedded = out.join("dorm-guest");
    fs::copy(target_dir.join(&target).join("guest/dorm-guest"), &embedded).expect("the guest was built");
    println!("cargo::rustc-env=DORM_GUEST_BINARY={}", embedded.display());
}
