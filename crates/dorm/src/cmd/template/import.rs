//! `dorm template import`: makes a template of files that exist.

use std::path::PathBuf;

use anyhow::Result;
use http::{Method, header};

use super::{path, render};
use crate::cli::Global;
use crate::exit::{Exit, Failure};
use crate::{progress, transfer};

/// Make a template of a root filesystem or an image
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: docker save alpine | dorm template import alpine -
         dorm template import tools ./oci-layout

FILE is a tar of a root filesystem, of `docker save` or of an OCI layout, plain or compressed; a folder
that holds an OCI layout or a root filesystem is packed on the way.")]
pub(crate) struct Args {
    name: String,
    /// A tar, a folder, or - for stdin
    file: PathBuf,
    /// Run the image's own entrypoint and command in every box
    #[arg(long)]
    start: bool,
    /// Show the log of the import
    #[arg(long, short)]
    verbose: bool,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let label = format!("sending {}", args.file.display());
    let (bar, length, body) = if args.file.as_os_str() == "-" {
        let bar = progress::transfer("sending", None);
        (bar.clone(), None, transfer::reader_body(tokio::io::stdin(), bar))
    } else {
        let metadata = std::fs::metadata(&args.file).map_err(|e| {
            let exit = if e.kind() == std::io::ErrorKind::NotFound {
                Exit::NotFound
            } else {
                Exit::Error
            };
            Failure::new(exit, format!("cannot read {}", args.file.display())).cause(e)
        })?;
        if metadata.is_dir() {
            let bar = progress::transfer(&label, None);
            (bar.clone(), None, transfer::pack(args.file.clone(), bar))
        } else {
            let bar = progress::transfer(&label, Some(metadata.len()));
            let file = tokio::fs::File::open(&args.file).await?;
            (
                bar.clone(),
                Some(metadata.len()),
                transfer::reader_body(file, bar),
            )
        }
    };
    let mut request = client
        .request(
            Method::POST,
            &path(
                &args.name,
                if args.start {
                    "/import?start=true"
                } else {
                    "/import"
                },
            ),
        )
        .header(header::CONTENT_TYPE, "application/x-tar");
    if let Some(length) = length {
        request = request.header(header::CONTENT_LENGTH, length);
    }
    let response = client.send(request.body(body)?).await;
    bar.finish_and_clear();
    render::follow(response?, &args.name, args.verbose, global.json).await
}
