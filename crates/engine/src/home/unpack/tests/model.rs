//! Random layers, applied one after the other, give the tree that a map of paths gives.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::archives::Layer;

#[derive(Debug, Clone)]
enum Op {
    Dir(String),
    File(String, u8),
    Symlink(String),
    Whiteout(String),
    Opaque(String),
}

#[derive(Debug, Clone, PartialEq)]
enum Node {
    Dir,
    File(u8),
    Symlink,
}

/// The names of a tree, each with the layer that brought it.
#[derive(Default)]
struct Model(BTreeMap<String, (Node, usize)>);

impl Model {
    /// `None` where a parent is not a directory: the archive is then refused, and the test skips it.
    fn put(&mut self, path: &str, node: Node, layer: usize) -> Option<()> {
        let mut parent = String::new();
        for component in path.split('/').collect::<Vec<_>>().split_last().unwrap().1 {
            parent = join(&parent, component);
            match self.0.get(&parent) {
                // Made on the way: nobody's, so that a whiteout takes it once it is empty.
                None => drop(self.0.insert(parent.clone(), (Node::Dir, usize::MAX))),
                Some((Node::Dir, _)) => {}
                Some(_) => return None,
            }
        }
        if !(node == Node::Dir && matches!(self.0.get(path), Some((Node::Dir, _)))) {
            self.remove_all(path);
        }
        self.0.insert(path.to_owned(), (node, layer));
        Some(())
    }

    fn remove_all(&mut self, path: &str) {
        let below = format!("{path}/");
        self.0.retain(|p, _| p != path && !p.starts_with(&below));
    }

    /// Takes away `path` and what is below, but for what `layer` brought and the way to it.
    fn hide(&mut self, path: &str, layer: usize) {
        let below = format!("{path}/");
        let kept: Vec<String> = self
            .0
            .iter()
            .filter(|(p, (_, by))| (*p == path || p.starts_with(&below)) && *by == layer)
            .map(|(p, _)| p.clone())
            .collect();
        self.0.retain(|p, _| {
            let hidden = p == path || p.starts_with(&below);
            !hidden || kept.iter().any(|k| k == p || k.starts_with(&format!("{p}/")))
        });
    }

    fn is_dir_or_absent(&self, path: &str) -> bool {
        matches!(self.0.get(path), None | Some((Node::Dir, _)))
    }

    fn apply(&mut self, op: &Op, layer: usize) -> Option<()> {
        match op {
            Op::Dir(p) => self.put(p, Node::Dir, layer),
            Op::File(p, content) => self.put(p, Node::File(*content), layer),
            Op::Symlink(p) => self.put(p, Node::Symlink, layer),
            Op::Whiteout(p) => {
                if p.rsplit_once('/')
                    .is_none_or(|(parent, _)| self.is_dir_or_absent(parent))
                {
                    self.hide(p, layer);
                }
                Some(())
            }
            Op::Opaque(p) => {
                if self.is_dir_or_absent(p) {
                    let below = format!("{p}/");
                    let children: Vec<String> = self
                        .0
                        .keys()
                        .filter(|k| k.strip_prefix(&below).is_some_and(|rest| !rest.contains('/')))
                        .cloned()
                        .collect();
                    children.iter().for_each(|child| self.hide(child, layer));
                }
                Some(())
            }
        }
    }
}

fn join(parent: &str, name: &str) -> String {
    if parent.is_empty() {
        name.to_owned()
    } else {
        format!("{parent}/{name}")
    }
}

fn path() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4).prop_map(|c| c.join("/"))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => path().prop_map(Op::Dir),
        4 => (path(), any::<u8>()).prop_map(|(p, c)| Op::File(p, c)),
        1 => path().prop_map(Op::Symlink),
        2 => path().prop_map(Op::Whiteout),
        1 => path().prop_map(Op::Opaque),
    ]
}

fn add(layer: Layer, op: &Op) -> Layer {
    match op {
        Op::Dir(p) => layer.dir(p),
        Op::File(p, content) => layer.file(p, &content.to_string()),
        // To nowhere: where a link leads is the hostile archives' matter.
        Op::Symlink(p) => layer.symlink(p, "nowhere"),
        Op::Whiteout(p) => match p.rsplit_once('/') {
            Some((parent, name)) => layer.file(&format!("{parent}/.wh.{name}"), ""),
            None => layer.file(&format!(".wh.{p}"), ""),
        },
        Op::Opaque(p) => layer.file(&format!("{p}/.wh..wh..opq"), ""),
    }
}

fn walk(dir: &Path, prefix: &str, into: &mut BTreeMap<String, Node>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let path = join(prefix, entry.file_name().to_str().unwrap());
        let kind = entry.file_type().unwrap();
        let node = if kind.is_symlink() {
            Node::Symlink
        } else if kind.is_dir() {
            walk(&entry.path(), &path, into);
            Node::Dir
        } else {
            Node::File(fs::read_to_string(entry.path()).unwrap().parse().unwrap())
        };
        into.insert(path, node);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn layers_applied_in_order_give_the_tree_of_the_model(
        layers in prop::collection::vec(prop::collection::vec(op(), 0..8), 1..4),
    ) {
        let root = tempfile::tempdir().unwrap();
        let mut model = Model::default();
        for (n, ops) in layers.iter().enumerate() {
            let mut layer = Layer::default();
            for op in ops {
                // An entry below a file or a link to nowhere is an error, so it is left out of the archive.
                let mut trial = Model(model.0.clone());
                if trial.apply(op, n).is_some() {
                    model = trial;
                    layer = add(layer, op);
                }
            }
            layer.apply(root.path()).unwrap();
        }
        let mut found = BTreeMap::new();
        walk(root.path(), "", &mut found);
        let expected: BTreeMap<_, _> = model.0.into_iter().map(|(p, (node, _))| (p, node)).collect();
        prop_assert_eq!(found, expected);
    }
}
