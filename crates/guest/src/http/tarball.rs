//! `/dorm/tar`: whole folders as tar streams, both ways, with the rights of the user.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use futures_util::StreamExt;
use http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use tar::{Archive, Builder, EntryType, Header, HeaderMode};
use tokio::sync::mpsc;

use super::body::{self, Body, Failure};
use super::upload::{bytes_of, drain};
use crate::chunks::{ChunkReader, ChunkWriter, IN_FLIGHT};
use crate::files::{ops, path};
use crate::identity;
use crate::log::log;
use crate::settings::Settings;

/// Streams a folder's contents, or one file under its name.
pub(super) async fn pack(settings: &Settings, request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    let query = body::query(request.uri())?;
    let user = body::user(settings, request.headers(), &query)?;
    let source = path::resolve(&user, body::path(&query)?);
    let (checked, told) = (source.clone(), source.display().to_string());
    // A folder that cannot be read is better refused now than cut off later.
    let check = move || {
        let metadata = fs::metadata(&checked)?;
        if metadata.is_dir() {
            fs::read_dir(&checked).map(drop)
        } else {
            fs::File::open(&checked).map(drop)
        }
    };
    identity::run(user.clone(), check)
        .await
        .map_err(|e| Failure::file(&told, &e))?;
    let (mut out, from) = ChunkWriter::new();
    tokio::task::spawn_blocking(move || {
        let packed = identity::with(&user, || pack_to(&source, &mut out));
        if let Err(e) = packed.and_then(|()| out.flush()) {
            log!("{told} was not packed to the end: {e}");
            out.fail(e);
        }
    });
    crate::memory::trim_soon();
    let mut response = Response::new(Body::Chunks { from, left: None });
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-tar"),
    );
    Ok(response)
}

fn pack_to(source: &Path, out: &mut ChunkWriter) -> io::Result<()> {
    let mut builder = Builder::new(out);
    builder.mode(HeaderMode::Complete);
    builder.follow_symlinks(false);
    if fs::metadata(source)?.is_dir() {
        pack_folder(&mut builder, source, Path::new(""))?;
    } else {
        let source = fs::canonicalize(source)?;
        let name = PathBuf::from(source.file_name().unwrap_or_default());
        pack_one(&mut builder, &source, &name)?;
    }
    builder.finish()
}

fn pack_folder<W: Write>(builder: &mut Builder<W>, folder: &Path, name: &Path) -> io::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        pack_one(builder, &entry.path(), &name.join(entry.file_name()))?;
    }
    Ok(())
}

fn pack_one<W: Write>(builder: &mut Builder<W>, source: &Path, name: &Path) -> io::Result<()> {
    let with_path = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", source.display()));
    let metadata = match fs::symlink_metadata(source) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata.map_err(with_path)?,
    };
    let mut header = Header::new_gnu();
    header.set_metadata(&metadata);
    if metadata.is_dir() {
        header.set_size(0);
        builder.append_data(&mut header, name, io::empty())?;
        pack_folder(builder, source, name).map_err(with_path)
    } else if metadata.is_symlink() {
        let target = fs::read_link(source).map_err(with_path)?;
        header.set_size(0);
        builder.append_link(&mut header, name, target)
    } else if metadata.is_file() {
        let file = fs::File::open(source).map_err(with_path)?;
        let size = file.metadata()?.len();
        header.set_size(size);
        // Exactly as many bytes as the header says, even if the file changes meanwhile.
        builder.append_data(&mut header, name, file.chain(io::repeat(0)).take(size))
    } else {
        // Sockets, pipes and devices mean nothing elsewhere.
        Ok(())
    }
}

/// Unpacks a tar stream into a folder, which is made if needed.
pub(super) async fn unpack(
    settings: &Settings,
    request: Request<Incoming>,
) -> Result<Response<Body>, Failure> {
    let query = body::query(request.uri())?;
    let user = body::user(settings, request.headers(), &query)?;
    let target = path::resolve(&user, body::path(&query)?);
    let told = target.display().to_string();
    let (parts, body) = request.into_parts();
    let mut bytes = bytes_of(&parts.headers, body)?;
    let (sender, received) = mpsc::channel(IN_FLIGHT);
    let thread = tokio::task::spawn_blocking(move || {
        identity::with(&user, || unpack_from(ChunkReader::new(received), &target))
    });
    while let Some(chunk) = bytes.next().await {
        let failed = chunk.is_err();
        if sender.send(chunk).await.is_err() || failed {
            break;
        }
    }
    drop(sender);
    let unpacked = thread.await.unwrap_or_else(|e| Err(io::Error::other(e)));
    crate::memory::trim_soon();
    if let Err(e) = unpacked {
        drain(bytes);
        return Err(Failure::file(&told, &e));
    }
    Ok(body::empty(StatusCode::NO_CONTENT))
}

fn refuse(name: &Path, why: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the archive's '{}' {why}", name.display()),
    )
}

/// What the library says of a broken archive is not the file system's fault.
fn broken(e: io::Error) -> io::Error {
    match e.kind() {
        io::ErrorKind::Other => io::Error::new(io::ErrorKind::InvalidData, e),
        _ => e,
    }
}

fn unpack_from(reader: ChunkReader, target: &Path) -> io::Result<()> {
    ops::make_folders(target)?;
    let target = fs::canonicalize(target)?;
    let mut archive = Archive::new(reader);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_overwrite(true);
    let mut folders = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry.map_err(broken)?;
        let name = PathBuf::from(std::ffi::OsStr::from_bytes(&entry.path_bytes()));
        if name.components().any(|c| c == Component::ParentDir) {
            return Err(refuse(&name, "leads out of the folder"));
        }
        match entry.header().entry_type() {
            EntryType::Directory => {
                let (mode, mtime) = (entry.header().mode(), entry.header().mtime());
                let path = make_inside(&target, &name)?;
                folders.push((path, mode.map_err(broken)?, mtime.map_err(broken)?));
            }
            EntryType::Regular
            | EntryType::Continuous
            | EntryType::GNUSparse
            | EntryType::Symlink
            | EntryType::Link => {
                if !entry.unpack_in(&target).map_err(broken)? {
                    return Err(refuse(&name, "leads out of the folder"));
                }
            }
            EntryType::XGlobalHeader => {}
            _ => return Err(refuse(&name, "is neither a file, a folder nor a link")),
        }
    }
    // Last and the innermost first, so that neither modes nor times of folders stand in the way.
    folders.sort_by(|a, b| b.0.cmp(&a.0));
    for (path, mode, mtime) in folders.into_iter().filter(|(path, ..)| *path != target) {
        let folder = fs::File::open(&path)?;
        folder.set_modified(UNIX_EPOCH + Duration::from_secs(mtime))?;
        folder.set_permissions(fs::Permissions::from_mode(mode & 0o7777))?;
    }
    Ok(())
}

/// Makes a folder of the archive, unless a link leads its path elsewhere.
fn make_inside(target: &Path, name: &Path) -> io::Result<PathBuf> {
    let mut path = target.to_owned();
    for part in name.components() {
        if let Component::Normal(part) = part {
            path.push(part);
            match fs::symlink_metadata(&path) {
                Ok(m) if m.is_dir() => {}
                Ok(_) => {
                    let inside = fs::canonicalize(&path)?;
                    if !inside.starts_with(target) || !fs::metadata(&inside)?.is_dir() {
                        return Err(refuse(name, "leads out of the folder"));
                    }
                }
                Err(_) => fs::create_dir(&path)?,
            }
        }
    }
    // Files still have to be put into it, whatever mode it gets in the end.
    let mode = fs::metadata(&path)?.mode();
    if mode & 0o700 != 0o700 {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode | 0o700))?;
    }
    Ok(path)
}
