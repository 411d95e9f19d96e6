use std::path::Path;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

use super::pair::load;
use super::*;

struct Made {
    dir: tempfile::TempDir,
    files: TlsFiles,
}

impl Made {
    fn put(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join(name), text).unwrap();
    }
}

/// A chain of three: leaf, intermediate, root.
fn made(change: impl FnOnce(&mut CertificateParams)) -> (Made, [String; 3]) {
    let ca = |name: &str| {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
    };
    let (root, root_key) = (ca("tests' root"), KeyPair::generate().unwrap());
    let (middle, middle_key) = (ca("tests' middle"), KeyPair::generate().unwrap());
    let by_root = Issuer::from_params(&root, &root_key);
    let mut leaf = CertificateParams::new(vec!["dorm.test".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    change(&mut leaf);
    let key = KeyPair::generate().unwrap();
    let chain = [
        leaf.signed_by(&key, &Issuer::from_params(&middle, &middle_key))
            .unwrap()
            .pem(),
        middle.signed_by(&middle_key, &by_root).unwrap().pem(),
        root.self_signed(&root_key).unwrap().pem(),
    ];
    let dir = tempfile::tempdir().unwrap();
    let files = TlsFiles {
        certificate: dir.path().join("chain"),
        key: dir.path().join("key"),
    };
    let made = Made { dir, files };
    made.put("chain", &chain.concat());
    made.put("key", &key.serialize_pem());
    (made, chain)
}

#[test]
fn a_chain_says_for_whom_and_until_when_it_is() {
    let (made, _) = made(|leaf| leaf.not_after = date_time_ymd(2001, 1, 1));
    let facts = load(&made.files).unwrap().facts;
    assert_eq!(facts.names, ["dorm.test", "127.0.0.1"]);
    assert!(
        facts.complete && facts.issuer.contains("tests' middle"),
        "{facts:?}"
    );
    assert_eq!(facts.trouble(facts.not_after), None);
    assert_eq!(facts.trouble(facts.not_after + 1), Some("it has expired"));
    assert!(
        facts
            .trouble(facts.not_before - 1)
            .unwrap()
            .contains("not valid yet")
    );
}

#[test]
fn what_cannot_be_used_is_refused_with_the_file_that_is_wrong() {
    let (made, [leaf, middle, root]) = made(|_| {});
    let says = |words: &[&str]| {
        let error = load(&made.files).map(|_| ()).unwrap_err();
        let text = crate::lifecycle::in_full(&error);
        for word in words {
            assert!(text.contains(word), "{text} does not say {word}");
        }
    };
    made.put("chain", &[leaf.clone(), root, middle.clone()].concat());
    says(&["certificate 1", "own comes first"]);
    made.put("chain", "nothing");
    says(&["chain", "no certificate in PEM"]);
    made.put("chain", &[leaf.clone(), middle].concat());
    assert!(
        !load(&made.files).unwrap().facts.complete,
        "the root is known to nobody"
    );
    made.put("chain", &leaf);
    assert!(!load(&made.files).unwrap().facts.complete);
    made.put("key", &leaf);
    says(&["key", "no private key in PEM"]);
    made.put("key", &KeyPair::generate().unwrap().serialize_pem());
    says(&["does not belong"]);
    std::fs::remove_file(&made.files.key).unwrap();
    says(&["key", "cannot be read"]);
}

#[tokio::test]
async fn a_new_pair_is_taken_once_it_is_whole_and_an_expired_one_is_not() {
    let shown = |current: &Current| current.0.read().unwrap().end_entity_cert().unwrap().to_vec();
    let (made, _) = made(|_| {});
    let first = load(&made.files).unwrap().key;
    let current = Arc::new(Current(RwLock::new(first.clone())));
    let ending = CancellationToken::new();
    let copy = |from: &Path, name: &str| std::fs::copy(from, made.dir.path().join(name)).unwrap();
    let expired = super::tests::made(|leaf| leaf.not_after = date_time_ymd(2001, 1, 1)).0;
    let next = super::tests::made(|_| {}).0;
    tokio::time::pause();
    let watching = tokio::spawn(files::watch(made.files.clone(), current.clone(), ending.clone()));
    let a_while = || tokio::time::sleep(Duration::from_secs(11));
    a_while().await;
    copy(&expired.files.certificate, "chain");
    copy(&expired.files.key, "key");
    a_while().await;
    assert_eq!(shown(&current), first.end_entity_cert().unwrap().to_vec());
    copy(&next.files.certificate, "chain");
    a_while().await;
    assert_eq!(shown(&current), first.end_entity_cert().unwrap().to_vec());
    copy(&next.files.key, "key");
    a_while().await;
    assert_ne!(shown(&current), first.end_entity_cert().unwrap().to_vec());
    ending.cancel();
    watching.await.unwrap();
}
