//! Links to upload what template builds copy.

use super::*;

#[tokio::test]
async fn an_upload_that_broke_off_may_be_tried_again_by_the_same_link() {
    let server = Server::new().await;
    let mut request = server.request(Method::GET, "/templates/web/files/0123abcd", Body::empty());
    request.headers_mut().insert("host", "localhost".parse().unwrap());
    let (status, link) = read(server.send(request).await).await;
    assert_eq!(status, StatusCode::CREATED, "{link}");
    let path = link["url"]
        .as_str()
        .unwrap()
        .strip_prefix("http://localhost")
        .unwrap();
    let put = async |body: Body| {
        let request = server.request(Method::PUT, path, body);
        server.send(request).await.status()
    };
    let pieces = [Ok("half of "), Err(std::io::Error::other("the client has gone"))];
    let broken = put(Body::from_stream(futures_util::stream::iter(pieces))).await;
    assert!(broken.is_client_error(), "{broken}");
    assert_eq!(put(Body::from("the archive")).await, StatusCode::OK);
    assert_eq!(put(Body::from("another")).await, StatusCode::FORBIDDEN);
}
