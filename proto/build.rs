//! Compiles the `.proto` files without protoc: protox makes the descriptors, connectrpc-build the code.

use std::path::PathBuf;

use protox::prost::Message;

const FILES: [&str; 2] = ["process/process.proto", "filesystem/filesystem.proto"];

fn main() {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let set = out.join("descriptors.bin");
    let descriptors = protox::compile(FILES, ["proto"]).unwrap_or_else(|e| panic!("{e:?}"));
    std::fs::write(&set, descriptors.encode_to_vec()).expect("OUT_DIR is writable");
    connectrpc_build::Config::new()
        .files(&FILES)
        .descriptor_set(set)
        .include_file("dorm_proto.rs")
        .gate_client_feature(true)
        .emit_rerun_directives(false)
        .compile()
        .expect("the code generator accepts the descriptors");
}
