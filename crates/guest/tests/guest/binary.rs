use buffa::Message;
use dorm_proto::process::process_event::Event;
use dorm_proto::process::process_event::data_event::Output;
use dorm_proto::process::{ListRequest, ListResponse, ProcessConfig, StartRequest, StartResponse};

use crate::client::{Guest, envelope};

#[test]
fn the_protocol_is_also_spoken_in_binary() {
    let guest = Guest::start();
    let request = StartRequest {
        process: ProcessConfig {
            cmd: "/bin/bash".into(),
            args: vec!["-c".into(), "printf 'a\\0b'; exit 5".into()],
            ..Default::default()
        }
        .into(),
        stdin: Some(false),
        ..Default::default()
    };
    let headers = [("Content-Type", "application/connect+proto")];
    let body = envelope(&request.encode_to_vec());
    let answer = guest.request("POST", "/process.Process/Start", &headers, &body);
    assert_eq!(answer.status, 200);

    let mut frames = answer.body.as_slice();
    let mut output = Vec::new();
    let mut code = None;
    while !frames.is_empty() {
        let len = u32::from_be_bytes(frames[1..5].try_into().unwrap()) as usize;
        let (flags, message) = (frames[0], &frames[5..5 + len]);
        frames = &frames[5 + len..];
        if flags & 2 != 0 {
            assert_eq!(message, b"{}");
            break;
        }
        let response = StartResponse::decode_from_slice(message).unwrap();
        match response.event.event.clone().unwrap() {
            Event::Data(data) => match data.output.unwrap() {
                Output::Stdout(bytes) => output.extend(bytes),
                other => panic!("{other:?}"),
            },
            Event::End(end) => code = Some(end.exit_code),
            Event::Start(_) | Event::Keepalive(_) => {}
        }
    }
    assert_eq!((output.as_slice(), code), (&b"a\0b"[..], Some(5)));

    let headers = [("Content-Type", "application/proto")];
    let answer = guest.request(
        "POST",
        "/process.Process/List",
        &headers,
        &ListRequest::default().encode_to_vec(),
    );
    assert_eq!(
        ListResponse::decode_from_slice(&answer.body)
            .unwrap()
            .processes
            .len(),
        0
    );
}
