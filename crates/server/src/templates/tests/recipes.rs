//! Which recipes are taken, and by what hash they are known.

use std::collections::BTreeMap;

use super::super::recipe::{Identity, check, check_name};
use super::*;

fn hash(recipe: &Recipe, parent: Option<&str>, host_ca: Option<&str>) -> String {
    Identity {
        recipe,
        parent,
        host_ca,
        script: None,
    }
    .hash()
}

#[test]
fn a_recipe_has_the_same_hash_however_it_was_written() {
    let written = r#"{"run": ["make"], "env": {"B": "2", "A": "1"}, "from": "debian:bookworm"}"#;
    let read: Recipe = serde_json::from_str(written).unwrap();
    let made = Recipe {
        from: "debian:bookworm".into(),
        run: vec!["make".into()],
        env: BTreeMap::from([("A".into(), "1".into()), ("B".into(), "2".into())]),
        ..Recipe::default()
    };
    assert_eq!(hash(&read, None, None), hash(&made, None, None));
    assert_eq!(hash(&made, None, None).len(), 64);
}

/// What is in the cache of templates is found by it.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_recipe_keeps_the_hash_that_it_had_before_more_could_be_said_in_one() {
    assert_eq!(
        hash(&debian(), None, None),
        "b557b851a8182cab908cb827090b4620d60c33cf8272ab3455283412291c52dd"
    );
}

#[test]
fn whatever_changes_the_template_changes_the_hash() {
    let base = debian();
    let mut hashes = vec![
        hash(&base, None, None),
        hash(&base, Some("parent"), None),
        hash(&base, Some("other"), None),
        hash(&base, None, Some("parent")),
        hash(
            &Recipe {
                from: "debian:trixie".into(),
                ..base.clone()
            },
            None,
            None,
        ),
        hash(
            &Recipe {
                apt: vec!["git".into(), "bash".into()],
                ..base.clone()
            },
            None,
            None,
        ),
        hash(
            &Recipe {
                run: vec!["true".into()],
                ..base.clone()
            },
            None,
            None,
        ),
        hash(
            &Recipe {
                files: vec![file("/a", "")],
                ..base.clone()
            },
            None,
            None,
        ),
        hash(
            &Recipe {
                user: Some("user".into()),
                ..base.clone()
            },
            None,
            None,
        ),
        hash(
            &Recipe {
                start: Some("user".into()),
                ..base
            },
            None,
            None,
        ),
    ];
    let count = hashes.len();
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), count);
}

#[test]
fn recipes_that_cannot_be_built_are_refused_with_the_reason() {
    let wrong = |change: fn(&mut Recipe)| {
        let mut recipe = debian();
        change(&mut recipe);
        check(&recipe).expect_err("a wrong recipe").to_string()
    };
    assert!(wrong(|r| r.from = String::new()).contains("`from` is missing"));
    assert!(wrong(|r| r.from = "debian:--help".into()).contains("not a Debian suite"));
    assert!(wrong(|r| r.apt.push("-o=x".into())).contains("not a package name"));
    assert!(wrong(|r| r.apt.push("a,b".into())).contains("not a package name"));
    assert!(wrong(|r| r.files.push(file("relative", ""))).contains("absolute"));
    assert!(wrong(|r| r.files.push(file("/a/../b", ""))).contains("absolute"));
    assert!(wrong(|r| r.files.push(file("/a", "not base64!"))).contains("base64"));
    assert!(
        wrong(|r| r.files.push(RecipeFile {
            mode: Some("999".into()),
            ..file("/a", "")
        }))
        .contains("octal")
    );
    assert!(
        wrong(|r| r.files.push(RecipeFile {
            owner: Some("a:b:c".into()),
            ..file("/a", "")
        }))
        .contains("owner")
    );
    assert!(wrong(|r| r.run.push(" ".into())).contains("empty"));
    assert!(wrong(|r| drop(r.env.insert("A=B".into(), "".into()))).contains("environment"));
    assert!(wrong(|r| r.user = Some("-u".into())).contains("user name"));
    assert!(wrong(|r| r.workdir = Some("here".into())).contains("absolute"));
    check(&Recipe {
        apt: vec!["libstdc++6:amd64".into(), "g++=4:12.2".into()],
        ..debian()
    })
    .unwrap();
}

#[test]
fn names_are_also_file_names_and_are_held_to_that() {
    for name in ["base", "code-interpreter-v1", "python3.12", "7", "web:v1.0"] {
        check_name(name).unwrap();
    }
    for name in [
        "",
        "-x",
        ".hidden",
        "a/b",
        "Base",
        "ä",
        &"x".repeat(64),
        "a\0",
        "a:",
        ":a",
        "a:b:c",
        "debian:sid",
    ] {
        assert!(check_name(name).is_err(), "{name:?}");
    }
}
