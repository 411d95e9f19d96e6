//! The way through the daemon beside the shortest way there is: a small request to a server in a box beside one through a bare
//! reverse proxy, and a large file beside one from a plain file server. The two of a pair take turns, so that a busy
//! machine hits both.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Result, ensure};
use bytes::Bytes;
use futures_util::stream;
use http::{Method, Request};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use super::files::{BLOCK, ROUNDS, SIZE, block};
use super::nginx::Nginx;
use super::report::{Measurement, Samples};
use super::{Bench, bare};
use crate::client::{Body, full, streamed};

pub(super) const THROUGH: &str = "small request through dorm's proxy";
pub(super) const BARE: &str = "small request through a bare proxy";
pub(super) const UPLOAD: &str = "upload of 256 MiB through dorm";
pub(super) const DOWNLOAD: &str = "download of 256 MiB through dorm";
pub(super) const PLAIN_UPLOAD: &str = "the same to a plain file server";
pub(super) const PLAIN_DOWNLOAD: &str = "the same from a plain file server";
pub(super) const NGINX_UPLOAD: &str = "the same to nginx";
pub(super) const NGINX_DOWNLOAD: &str = "the same from nginx";
const WARM_UPS: u32 = 20;
const PATH: &str = "/var/tmp/dorm-bench";

type Plain = Client<HttpConnector, Body>;

pub(super) async fn measure(bench: &Bench) -> Result<Vec<Measurement>> {
    let agent = bench.agent().await?;
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let plain: Plain = Client::builder(TokioExecutor::new()).build(connector);
    let mut measured = small(bench, agent.id.as_str(), &plain).await?;
    measured.extend(large(bench, &agent.name, &plain).await?);
    bench.delete(&agent.name).await?;
    Ok(measured)
}

async fn small(bench: &Bench, id: &str, plain: &Plain) -> Result<Vec<Measurement>> {
    let proxy = bare::reverse_proxy(bare::nothing()?)?;
    let (mut through, mut beside) = (Samples::new()?, Samples::new()?);
    // Cheap, and a median of many is steadier.
    for round in 0..WARM_UPS + bench.runs.saturating_mul(20) {
        let begun = Instant::now();
        let request = bench
            .client
            .request(Method::GET, "/health")
            .header("e2b-sandbox-id", id);
        bench
            .client
            .send(request.body(full(""))?)
            .await?
            .into_body()
            .collect()
            .await?;
        let first = begun.elapsed();
        let begun = Instant::now();
        ask(plain, Method::GET, proxy, full("")).await?;
        let second = begun.elapsed();
        if round >= WARM_UPS {
            through.add(first)?;
            beside.add(second)?;
        }
    }
    Ok(vec![
        Measurement::new(THROUGH, &through, None),
        Measurement::new(BARE, &beside, None),
    ])
}

/// Gives how many bytes came back.
async fn ask(plain: &Plain, method: Method, to: SocketAddr, body: Body) -> Result<u64> {
    let request = Request::builder()
        .method(method)
        .uri(format!("http://{to}/file"))
        .body(body)?;
    let response = plain.request(request).await?;
    ensure!(
        response.status().is_success(),
        "a server of the bench answered {}",
        response.status()
    );
    taken(response.into_body()).await
}

async fn taken(mut body: Incoming) -> Result<u64> {
    let mut received = 0;
    while let Some(frame) = body.frame().await {
        received += frame?.into_data().map_or(0, |data| data.len() as u64);
    }
    Ok(received)
}

/// A file server to compare with.
struct Rival {
    address: SocketAddr,
    names: [&'static str; 2],
    up: Samples,
    down: Samples,
}

impl Rival {
    fn new(names: [&'static str; 2], address: SocketAddr) -> Result<Self> {
        let (up, down) = (Samples::new()?, Samples::new()?);
        Ok(Self {
            address,
            names,
            up,
            down,
        })
    }
}

async fn large(bench: &Bench, agent: &str, plain: &Plain) -> Result<Vec<Measurement>> {
    let guest = bench.client.guest(agent, Some("root"));
    // On the filesystem that homes are on.
    let pool = Some(bench.data.join("pool")).filter(|pool| pool.is_dir());
    let folder = tempfile::tempdir_in(pool.as_ref().unwrap_or(&bench.data))?;
    let server = bare::file_server(folder.path().join("file"))?;
    let mut rivals = vec![Rival::new([PLAIN_UPLOAD, PLAIN_DOWNLOAD], server)?];
    let nginx = Nginx::start(folder.path())?;
    if let Some(nginx) = &nginx {
        rivals.push(Rival::new([NGINX_UPLOAD, NGINX_DOWNLOAD], nginx.address)?);
    }
    let block = Bytes::from(block());
    let blocks = || {
        let blocks = std::iter::repeat_n(block.clone(), SIZE as usize / BLOCK);
        streamed(stream::iter(blocks.map(Ok)))
    };
    let (mut up, mut down) = (Samples::new()?, Samples::new()?);
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        guest.upload(PATH, Some(SIZE), blocks()).await?;
        up.add(begun.elapsed())?;
        for rival in &mut rivals {
            let begun = Instant::now();
            ask(plain, Method::PUT, rival.address, blocks()).await?;
            rival.up.add(begun.elapsed())?;
        }

        let begun = Instant::now();
        let received = taken(guest.download(PATH).await?.into_body()).await?;
        down.add(begun.elapsed())?;
        ensure!(received == SIZE, "{received} bytes came back of {SIZE}");
        for rival in &mut rivals {
            let begun = Instant::now();
            let received = ask(plain, Method::GET, rival.address, full("")).await?;
            rival.down.add(begun.elapsed())?;
            ensure!(received == SIZE, "{received} bytes came back of {SIZE}");
        }
    }
    let measured = |name, samples: &Samples| Measurement::new(name, samples, Some(SIZE));
    let mut all = vec![measured(UPLOAD, &up), measured(DOWNLOAD, &down)];
    for rival in &rivals {
        all.push(measured(rival.names[0], &rival.up));
        all.push(measured(rival.names[1], &rival.down));
    }
    if nginx.is_none() {
        all.push(Measurement::skipped(NGINX_DOWNLOAD, "nginx is not installed"));
    }
    Ok(all)
}
