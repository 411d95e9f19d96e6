//! `dorm template log`: the kept log of a template's build.

use anyhow::Result;
use futures_util::StreamExt;
use http::Method;

use super::path;
use crate::cli::Global;
use crate::client::full;
use crate::client::guest::chunks;
use crate::output;

/// Show the log of a template's build
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm template log base")]
pub(crate) struct Args {
    /// Name or id
    name: String,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let response = client
        .send(
            client
                .request(Method::GET, &path(&args.name, "/log"))
                .body(full(""))?,
        )
        .await?;
    let mut body = Box::pin(chunks(response.into_body()));
    if global.json {
        let mut log = Vec::new();
        while let Some(chunk) = body.next().await {
            log.extend_from_slice(&chunk?);
        }
        return output::json(&serde_json::json!({"log": String::from_utf8_lossy(&log)}));
    }
    while let Some(chunk) = body.next().await {
        output::bytes(&chunk?)?;
    }
    Ok(())
}
