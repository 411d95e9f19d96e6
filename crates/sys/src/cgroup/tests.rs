use std::process::{Child, Command};

use super::*;

/// A directory in the place of a group, which holds `files` as the kernel's would.
fn group_like(version: Version, files: &[(&str, &str)]) -> (Scratch, Group) {
    let scratch = Scratch::new();
    for (file, text) in files {
        fs::write(scratch.0.join(file), text).unwrap();
    }
    let directories = vec![("", scratch.0.clone())];
    (scratch, Group { version, directories })
}

struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("dorm-cgroup-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_field_is_found_by_its_whole_name() {
    let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n";
    assert_eq!(field(text, "oom_kill"), 7);
    assert_eq!(field(text, "oom"), 0);
}

#[test]
fn memory_that_is_in_swap_is_in_no_file_either() {
    let stat = "cache 9\nrss 100\nrss_huge 7\nshmem 20\nswap 3\ntotal_swap 8\n";
    let (_group, group) = group_like(Version::V1, &[("memory.stat", stat)]);
    assert_eq!(group.memory_in_no_file().unwrap(), 123);
}

#[test]
fn version_2_is_taken_with_all_its_controllers_only() {
    let root = Scratch::new();
    let controllers = root.0.join("cgroup.controllers");
    fs::write(&controllers, "cpuset cpu io memory hugetlb pids\n").unwrap();
    assert_eq!(version_at(&root.0).unwrap(), Version::V2);
    fs::write(&controllers, "cpuset cpu io pids\n").unwrap();
    let refused = version_at(&root.0).unwrap_err().to_string();
    assert!(refused.contains("without its controller memory"), "{refused}");
}

#[test]
fn version_1_is_taken_with_all_its_controllers_only() {
    let root = Scratch::new();
    for controller in V1_CONTROLLERS {
        let refused = version_at(&root.0).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("version 1 controller {controller}")),
            "{refused}"
        );
        fs::create_dir(root.0.join(controller)).unwrap();
        fs::write(root.0.join(controller).join("tasks"), "").unwrap();
    }
    assert_eq!(version_at(&root.0).unwrap(), Version::V1);
}

#[test]
fn limits_are_written_as_version_2_wants_them() {
    let files = ["cpu.max", "memory.max", "pids.max", "io.max"].map(|file| (file, ""));
    // Without swap accounting there is no memory.swap.max.
    let (scratch, group) = group_like(Version::V2, &files);
    let limits = GroupLimits {
        cpu_millis: 1500,
        memory: 1 << 30,
        pids: 77,
        io: Some(((7, 3), 4096)),
    };
    group.limit(&limits).unwrap();
    let read = |file: &str| fs::read_to_string(scratch.0.join(file)).unwrap();
    assert_eq!(read("cpu.max"), "150000 100000");
    assert_eq!(read("memory.max"), "1073741824");
    assert_eq!(read("pids.max"), "77");
    assert_eq!(read("io.max"), "7:3 rbps=4096 wbps=4096");
}

#[test]
fn no_processor_time_is_less_than_the_kernel_takes() {
    let files = ["cpu.max", "memory.max", "pids.max"].map(|file| (file, ""));
    let (scratch, group) = group_like(Version::V2, &files);
    let limits = GroupLimits {
        cpu_millis: 1,
        memory: 1 << 30,
        pids: 77,
        io: None,
    };
    group.limit(&limits).unwrap();
    assert_eq!(
        fs::read_to_string(scratch.0.join("cpu.max")).unwrap(),
        "1000 100000"
    );
}

#[test]
fn stats_are_read_as_version_2_tells_them() {
    let files = [
        ("cpu.stat", "usage_usec 12\nuser_usec 7\nsystem_usec 5\n"),
        ("memory.current", "4096\n"),
        ("memory.peak", "8192\n"),
        (
            "memory.events",
            "low 0\nmax 3\noom 2\noom_kill 1\noom_group_kill 0\n",
        ),
        ("pids.current", "5\n"),
        ("pids.events", "max 9\n"),
    ];
    let (scratch, group) = group_like(Version::V2, &files);
    let stats = GroupStats {
        cpu_usec: 12,
        memory: 4096,
        memory_peak: 8192,
        pids: 5,
        oom_kills: 1,
        forks_refused: 9,
    };
    assert_eq!(group.stats().unwrap(), stats);
    fs::remove_file(scratch.0.join("memory.peak")).unwrap();
    assert_eq!(group.stats().unwrap().memory_peak, 4096);
}

/// A group in the host's real version 2 tree, which a hybrid host has too, though without controllers.
struct Real(Group);

impl Real {
    fn make(name: &str) -> Option<Self> {
        let root = ["", "unified"].map(|below| Path::new(ROOT).join(below));
        let root = root.into_iter().find(|path| path.join("cgroup.procs").exists())?;
        let name = format!("dorm-sys-test-{name}-{}", std::process::id());
        let group = Group {
            version: Version::V2,
            directories: vec![("", root.join(name))],
        };
        group.make().ok().map(|()| Self(group))
    }

    /// A process in the group.
    fn process(&self) -> Child {
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        self.join(process.id()).unwrap();
        process
    }

    fn join(&self, pid: u32) -> io::Result<()> {
        let mut files = self.0.join_files().into_iter();
        files.try_for_each(|file| fs::write(file, pid.to_string()))
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.0.remove();
    }
}

#[test]
fn a_group_of_version_2_is_frozen_thawed_emptied_and_removed() {
    let Some(real) = Real::make("life") else {
        println!("skipped: no group of version 2 can be made here");
        return;
    };
    let mut process = real.process();
    assert_eq!(real.0.processes().unwrap(), [process.id() as i32]);
    assert!(!real.0.frozen().unwrap());
    real.0.freeze().unwrap();
    assert!(real.0.frozen().unwrap());
    assert!(real.0.remove().is_err(), "a group with a process was removed");
    real.0.thaw().unwrap();
    assert!(!real.0.frozen().unwrap());
    real.0.freeze().unwrap();
    // Unlike in version 1, the end comes to a frozen process too.
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(real.0.processes().unwrap(), [0i32; 0]);
    real.0.remove().unwrap();
    assert!(!real.0.exists());
}

#[test]
fn a_thread_of_the_kernel_in_a_group_of_version_2_does_not_keep_it_from_being_frozen() {
    let real = Real::make("kernel");
    let is_movable = |pid: &i32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"));
        // They serve nobody in particular, and may be moved.
        name.is_ok_and(|name| ["khugepaged", "kcompactd0"].contains(&name.trim()))
    };
    let thread = fs::read_dir("/proc").unwrap().flatten();
    let mut threads = thread.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let (Some(real), Some(thread)) = (real, threads.find(is_movable)) else {
        println!("skipped: no group of version 2 can be made here, or there is no thread to put into it");
        return;
    };
    assert!(is_kernel_thread(thread).unwrap() && !is_kernel_thread(std::process::id() as i32).unwrap());
    if let Err(error) = real.join(thread as u32) {
        println!("skipped: the thread cannot be moved: {error}");
        return;
    }
    let mut process = real.process();
    real.0.freeze().unwrap();
    assert!(real.0.frozen().unwrap());
    assert_eq!(real.0.processes().unwrap(), [process.id() as i32]);
    process.kill().unwrap();
    process.wait().unwrap();
}

#[test]
fn a_group_of_version_2_that_has_more_memory_than_its_new_limit_is_not_limited() {
    let files = [
        ("cpu.max", ""),
        ("pids.max", ""),
        ("memory.high", "max"),
        ("memory.max", "4096"),
        ("memory.current", "3000\n"),
    ];
    let (scratch, group) = group_like(Version::V2, &files);
    let read = |file: &str| fs::read_to_string(scratch.0.join(file)).unwrap();
    let to = |memory: u64| GroupLimits {
        memory,
        pids: 77,
        ..GroupLimits::default()
    };
    let refused = group.lower(&to(2000)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ResourceBusy, "{refused}");
    assert!(read("memory.max").starts_with("4096"), "it would be killed");
    assert_eq!(read("pids.max"), "77", "that kills nobody");
    assert!(read("memory.high").starts_with("max"), "it would be slowed down");
    group.lower(&to(3000)).unwrap();
    assert!(read("memory.max").starts_with("3000"));
}
