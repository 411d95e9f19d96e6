use super::*;

fn none(_: &str) -> Option<String> {
    None
}

fn load_with(flags: Layer, file: &str, variables: &[(&str, &str)]) -> Result<Settings> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, file).unwrap();
    let get = |name: &str| {
        variables
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, v)| (*v).to_owned())
    };
    load(flags, Some(&path), folder.path(), get)
}

fn text(error: anyhow::Error) -> String {
    format!("{error:#}")
}

#[test]
fn the_defaults_say_everything() {
    let folder = tempfile::tempdir().unwrap();
    let settings = load(Layer::default(), None, folder.path(), none).unwrap();
    assert_eq!(settings.server.listen.port(), 3676);
    assert!(settings.server.listen.ip().is_loopback());
    assert_eq!(settings.server.defaults.io_bps, None);
    assert_eq!(settings.pool.initial_size, 8 << 30);
    assert_eq!(settings.server.standby, Standby::default());
    assert_eq!(settings.server.on_shutdown, OnShutdown::Hibernate);
}

#[test]
fn flags_win_over_the_environment_over_the_file_over_the_defaults() {
    let file = "log = \"file\"\nstop_grace = 1\n[defaults]\npids = 7\nmemory = \"1G\"\n";
    let variables = [
        ("DORM_LOG", "environment"),
        ("DORM_STOP_GRACE", "2.5"),
        ("DORM_DEFAULT_PIDS", "8"),
    ];
    let flags = Layer {
        log: Some("flag".into()),
        ..Layer::default()
    };
    let settings = load_with(flags, file, &variables).unwrap();
    assert_eq!(settings.log, "flag");
    assert_eq!(settings.server.stop_grace, Duration::from_millis(2500));
    assert_eq!(settings.server.defaults.pids, 8);
    assert_eq!(settings.server.defaults.memory, 1 << 30);
    assert_eq!(settings.server.defaults.disk, 20 << 30);
}

#[test]
fn every_variable_of_a_key_reaches_it() {
    let variables = [
        ("DORM_NAMESERVERS", "9.9.9.9, ::1"),
        ("DORM_DEFAULT_IO", "10M"),
        ("DORM_POOL_MAX", "100G"),
        ("DORM_HOST_CA", "false"),
        ("DORM_TEMPLATE_CACHE", ""),
        ("DORM_ON_SHUTDOWN", "stop"),
        ("DORM_LOG_FORMAT", "json"),
        ("DORM_DEFAULT_CPUS", "0.5"),
        ("DORM_STANDBY_MEMORY", "25%"),
        ("DORM_STANDBY_AFTER", "0.5"),
        ("DORM_STANDBY_CPU", "10"),
    ];
    let settings = load_with(Layer::default(), "", &variables).unwrap();
    assert_eq!(settings.server.standby.memory, Budget::Percent(25.0));
    assert_eq!(settings.server.standby.after, Duration::from_millis(500));
    assert_eq!(settings.server.standby.cpu, 0.1);
    assert_eq!(settings.network.nameservers.len(), 2);
    assert_eq!(settings.server.defaults.io_bps, Some(10 << 20));
    assert_eq!(settings.server.defaults.cpu_millis, 500);
    assert_eq!(settings.pool.max_size, 100 << 30);
    assert_eq!(
        (settings.server.host_ca, settings.server.template_cache),
        (None, None)
    );
    assert_eq!(settings.server.on_shutdown, OnShutdown::Stop);
    assert_eq!(settings.log_format, LogFormat::Json);
}

#[test]
fn every_declared_key_is_one_of_the_defaults() {
    let defaults: toml::Table = toml::from_str(DEFAULTS).unwrap();
    for key in env::ALL.iter().filter_map(|v| v.key) {
        let found = match key.split_once('.') {
            Some((table, field)) => defaults.get(table).and_then(|t| t.get(field)),
            None => defaults.get(key),
        };
        assert!(found.is_some(), "{key} is not in defaults.toml");
    }
}

#[test]
fn standby_takes_a_size_or_a_percentage() {
    for (text, expected) in [
        ("\"8G\"", Budget::Bytes(8 << 30)),
        ("1024", Budget::Bytes(1024)),
        ("\"12.5%\"", Budget::Percent(12.5)),
    ] {
        let file = format!("[standby]\nmemory = {text}\n");
        let settings = load_with(Layer::default(), &file, &[]).unwrap();
        assert_eq!(settings.server.standby.memory, expected);
    }
    for text in ["\"lots\"", "\"101%\"", "-1"] {
        let file = format!("[standby]\nmemory = {text}\n");
        assert!(
            load_with(Layer::default(), &file, &[]).is_err(),
            "{text} was taken"
        );
    }
}

#[test]
fn a_mistake_is_reported_with_its_place() {
    let error =
        text(load_with(Layer::default(), "listen = \"127.0.0.1:1\"\nlisten_on = 3\n", &[]).unwrap_err());
    assert!(error.contains("listen_on") && error.contains("line 2"), "{error}");
    let error = text(load_with(Layer::default(), "[pool]\nsize = \"lots\"\n", &[]).unwrap_err());
    assert!(error.contains("lots") && error.contains("line 2"), "{error}");
    let error = text(load_with(Layer::default(), "", &[("DORM_LISTEN", "nowhere")]).unwrap_err());
    assert!(error.contains("DORM_LISTEN"), "{error}");
}

#[test]
fn ranges_that_cannot_work_are_refused() {
    for range in ["10.0.0.0", "10.0.0.1/16", "10.0.0.0/31", "x/8", "10.0.0.0/24"] {
        let file = format!("[network]\nrange = \"{range}\"\n");
        assert!(
            load_with(Layer::default(), &file, &[]).is_err(),
            "{range} was taken"
        );
    }
}
