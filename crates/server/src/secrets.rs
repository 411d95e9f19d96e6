//! Secrets of a workspace on their way into a box: where the environment of an agent says `${e2b.secrets.NAME}`, its
//! programs see the value. The records have the placeholder alone.

use dorm_engine::Env;

use crate::records::{SecretRecord, Workspace};
use crate::store::{Result, Store};

const BEGIN: &str = "${e2b.secrets.";

/// The names that a text speaks of.
fn named(text: &str) -> impl Iterator<Item = &str> {
    text.split(BEGIN)
        .skip(1)
        .filter_map(|rest| Some(rest.split_once('}')?.0))
}

/// The text with the values in it; `None` if one is missing.
fn filled(text: &str, secrets: &[SecretRecord]) -> Option<String> {
    let mut parts = text.split(BEGIN);
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once('}') {
            Some((name, rest)) => {
                whole.push_str(&secrets.iter().find(|secret| secret.name == name)?.value);
                whole.push_str(rest);
            }
            // No placeholder after all.
            None => {
                whole.push_str(BEGIN);
                whole.push_str(part);
            }
        }
    }
    Some(whole)
}

/// The first name in an environment that no secret has.
pub(crate) async fn missing(store: &dyn Store, workspace: &Workspace, env: &Env) -> Result<Option<String>> {
    let names: Vec<&str> = env.values().flat_map(|value| named(value)).collect();
    if names.is_empty() {
        return Ok(None);
    }
    let secrets = store.secrets(workspace).await?;
    let unknown = |name: &&&str| !secrets.iter().any(|secret| secret.name == ***name);
    Ok(names.iter().find(unknown).map(|name| (*name).to_owned()))
}

/// The environment as the box gets it, with the present values. A variable whose secret is gone is left out.
pub(crate) async fn fill(store: &dyn Store, workspace: &Workspace, env: Env) -> Result<Env> {
    if !env.values().any(|value| named(value).next().is_some()) {
        return Ok(env);
    }
    let secrets = store.secrets(workspace).await?;
    let fill = |(name, value): (String, String)| match filled(&value, &secrets) {
        Some(value) => Some((name, value)),
        None => {
            tracing::warn!(
                variable = name,
                "speaks of a secret that is not there, and is left out"
            );
            None
        }
    };
    Ok(env.into_iter().filter_map(fill).collect())
}

#[cfg(test)]
mod tests {
    use dorm_engine::Id;

    use super::*;
    use crate::store::memory::MemoryStore;

    #[tokio::test]
    async fn placeholders_become_values_and_nothing_else_changes() {
        let store = MemoryStore::default();
        let workspace = Workspace::default();
        let secret = SecretRecord {
            id: Id::random(),
            workspace: workspace.clone(),
            name: "a key".to_owned(),
            value: "${e2b.secrets.a key}x".to_owned(),
            version: 1,
            metadata: Default::default(),
            created: 1,
            updated: 1,
        };
        store.insert_secret(&secret).await.unwrap();
        let env = |value: &str| Env::from([("K".to_owned(), value.to_owned())]);
        for (given, expected) in [
            (
                "Bearer ${e2b.secrets.a key}!",
                Some("Bearer ${e2b.secrets.a key}x!"),
            ),
            ("plain ${HOME}", Some("plain ${HOME}")),
            ("open ${e2b.secrets.a key", Some("open ${e2b.secrets.a key")),
            ("${e2b.secrets.none}", None),
        ] {
            let filled = fill(&store, &workspace, env(given)).await.unwrap();
            assert_eq!(filled.get("K").map(String::as_str), expected, "{given}");
            let unknown = missing(&store, &workspace, &env(given)).await.unwrap();
            assert_eq!(unknown.is_some(), expected.is_none(), "{given}");
        }
        let other = Workspace::new("other");
        let nothing = fill(&store, &other, env("${e2b.secrets.a key}")).await;
        assert!(nothing.unwrap().is_empty());
    }
}
