//! The command line of a machine.

use dorm_proto::vm::WITH_MODULES;
use serde::{Deserialize, Serialize};

use super::accelerator::Accelerator;
use crate::launch::machine::{DISK, INITRD, KERNEL, MEMORY, MODULES, TAP_FD};

/// Abstract sockets in the network namespace of a machine's process, where nobody else is.
pub(crate) const GUEST_SOCKET: &str = "dorm-guest";
pub(crate) const MONITOR_SOCKET: &str = "dorm-monitor";
pub(crate) const VOLUMES_SOCKET: &str = "dorm-volumes";

/// What a machine is made of. Its state can be loaded only by one that is made alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hardware {
    /// QEMU's name of the machine, with a version: newer ones of QEMU have it, too.
    pub(crate) machine: String,
    pub(crate) accelerator: Accelerator,
    /// Who made the host's processor, if it was run by that. Unknown of machines of earlier versions.
    #[serde(default)]
    pub(crate) vendor: Option<String>,
    pub(crate) processors: u32,
    /// Bytes.
    pub(crate) memory: u64,
    /// Whether it has a second disk, with the modules of its kernel.
    #[serde(default)]
    pub(crate) modules: bool,
    /// Which kernel was booted in it, whose modules they are. Unknown of machines of earlier versions.
    #[serde(default)]
    pub(crate) kernel: Option<String>,
    /// Whether it has a port to a file server for its volumes.
    #[serde(default)]
    pub(crate) volumes: bool,
}

impl Hardware {
    /// Whether it can go on where machines are run by `here`. Otherwise why not, in words.
    pub(super) fn runs_by(&self, here: Accelerator) -> Result<(), String> {
        if self.accelerator == Accelerator::Tcg {
            return Ok(());
        }
        if here != Accelerator::Kvm {
            return Err("it was saved on a host with KVM, which does not work here".to_owned());
        }
        match (&self.vendor, here.vendor()) {
            (Some(then), Some(now)) if *then != now => Err(format!(
                "it was saved with KVM on a processor of {then}, and the processor here is one of {now}"
            )),
            _ => Ok(()),
        }
    }

    /// With `waiting`, the machine waits for a state to be loaded.
    pub(crate) fn arguments(&self, waiting: bool) -> Vec<String> {
        let accelerator = match self.accelerator {
            Accelerator::Kvm => "kvm",
            // Half of what code translated at run time may take otherwise is plenty for one box.
            Accelerator::Tcg => "tcg,thread=multi,tb-size=128",
        };
        let socket = |id: &str, name: &str| {
            format!("socket,id={id},path={name},abstract=on,tight=on,server=on,wait=off")
        };
        let megabytes = self.memory >> 20;
        let mut arguments: Vec<String> = Vec::new();
        let mut add = |option: &str, value: String| {
            arguments.push(format!("-{option}"));
            if !value.is_empty() {
                arguments.push(value);
            }
        };
        for plain in ["nodefaults", "no-user-config", "no-reboot"] {
            add(plain, String::new());
        }
        add("display", "none".to_owned());
        add(
            "sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".to_owned(),
        );
        add(
            "machine",
            format!(
                "{},memory-backend=ram,vmport=off,smm=off,sata=off,usb=off",
                self.machine
            ),
        );
        add("accel", accelerator.to_owned());
        add("cpu", self.accelerator.processor().to_owned());
        add("smp", self.processors.to_string());
        add("m", format!("{megabytes}M"));
        add(
            "object",
            format!("memory-backend-file,id=ram,mem-path={MEMORY},size={megabytes}M,share=on"),
        );
        add("kernel", KERNEL.to_owned());
        add("initrd", INITRD.to_owned());
        // A panic ends the machine, and with it the box. So does any other fault of its kernel, which may hold a lock that everybody waits for.
        let mut told = "console=ttyS0 quiet panic=-1 oops=panic no_timer_check".to_owned();
        if self.modules {
            told = format!("{told} {WITH_MODULES}");
        }
        add("append", told);
        add("chardev", "ringbuf,id=console,size=16384".to_owned());
        add("serial", "chardev:console".to_owned());
        add(
            "blockdev",
            format!("driver=file,node-name=disk,filename={DISK},discard=unmap"),
        );
        add(
            "device",
            "virtio-blk-pci,drive=disk,werror=report,rerror=report".to_owned(),
        );
        add("netdev", format!("tap,id=net,fd={TAP_FD}"));
        add("device", "virtio-net-pci,netdev=net,romfile=".to_owned());
        add("chardev", socket("guest", GUEST_SOCKET));
        add("device", "virtio-serial-pci".to_owned());
        add(
            "device",
            format!("virtserialport,chardev=guest,name={}", dorm_proto::vm::PORT_NAME),
        );
        if self.volumes {
            add("chardev", socket("volumes", VOLUMES_SOCKET));
            add(
                "device",
                format!(
                    "virtserialport,chardev=volumes,name={}",
                    dorm_proto::volume::PORT_NAME
                ),
            );
        }
        add("device", "virtio-balloon-pci,free-page-reporting=on".to_owned());
        if self.modules {
            add(
                "blockdev",
                format!("driver=file,node-name=modules,filename={MODULES},read-only=on"),
            );
            // The last, so that the other devices are where they are without it.
            add("device", "virtio-blk-pci,drive=modules".to_owned());
        }
        add("chardev", socket("monitor", MONITOR_SOCKET));
        add("mon", "chardev=monitor,mode=control".to_owned());
        if waiting {
            add("incoming", "defer".to_owned());
        }
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hardware(accelerator: Accelerator, modules: bool) -> Hardware {
        Hardware {
            machine: "pc-q35-7.2".to_owned(),
            accelerator,
            vendor: None,
            processors: 2,
            memory: 256 << 20,
            modules,
            kernel: None,
            volumes: false,
        }
    }

    /// The value behind each time that an option is given.
    fn values<'a>(arguments: &'a [String], option: &str) -> Vec<&'a str> {
        let pairs = arguments.iter().zip(&arguments[1..]);
        pairs
            .filter(|(one, _)| *one == option)
            .map(|(_, value)| value.as_str())
            .collect()
    }

    #[test]
    fn what_the_machine_sees_does_not_depend_on_what_runs_it() {
        let [kvm, tcg] = [Accelerator::Kvm, Accelerator::Tcg].map(|by| hardware(by, true).arguments(true));
        assert_eq!(values(&kvm, "-accel"), ["kvm"]);
        assert!(values(&tcg, "-accel")[0].starts_with("tcg"));
        let features = |arguments| {
            values(arguments, "-cpu")[0]
                .trim_end_matches(",enforce")
                .to_owned()
        };
        assert_eq!(features(&kvm), features(&tcg));
        for model in ["host", "max"] {
            assert!(!features(&kvm).contains(model), "its state could not move");
        }
        let differ = kvm.iter().zip(&tcg).filter(|(a, b)| a != b).count();
        assert_eq!((differ, kvm.len()), (2, tcg.len()));
    }

    #[test]
    fn what_kvm_ran_goes_on_with_a_processor_of_the_same_vendor_alone() {
        let of = |accelerator, vendor: Option<&str>| Hardware {
            vendor: vendor.map(str::to_owned),
            ..hardware(accelerator, true)
        };
        let (here, known) = (Accelerator::Kvm.vendor(), "TheHostKnowsNoSuchVendor");
        assert!(here.is_some(), "the host does not say whose its processor is");
        assert_eq!(
            of(Accelerator::Kvm, here.as_deref()).runs_by(Accelerator::Kvm),
            Ok(())
        );
        let other = of(Accelerator::Kvm, Some(known));
        assert!(other.runs_by(Accelerator::Kvm).unwrap_err().contains(known));
        assert!(
            of(Accelerator::Kvm, None).runs_by(Accelerator::Kvm).is_ok(),
            "an earlier version's"
        );
        assert!(of(Accelerator::Kvm, None).runs_by(Accelerator::Tcg).is_err());
        assert_eq!(Accelerator::Tcg.vendor(), None);
        for here in [Accelerator::Kvm, Accelerator::Tcg] {
            assert_eq!(of(Accelerator::Tcg, None).runs_by(here), Ok(()));
        }
    }

    #[test]
    fn devices_are_where_they_are_with_and_without_modules() {
        let [with, without] =
            [true, false].map(|modules| hardware(Accelerator::Tcg, modules).arguments(false));
        let (with, without) = (values(&with, "-device"), values(&without, "-device"));
        assert_eq!(with[..without.len()], without);
        assert_eq!(with.len(), without.len() + 1);
    }

    #[test]
    fn only_a_machine_with_volumes_has_a_port_for_them() {
        let without = hardware(Accelerator::Tcg, true);
        let with = Hardware {
            volumes: true,
            ..without.clone()
        };
        let ports = |hardware: &Hardware| {
            let arguments = hardware.arguments(false);
            let devices = values(&arguments, "-device");
            devices
                .iter()
                .filter(|device| device.starts_with("virtserialport"))
                .count()
        };
        assert_eq!((ports(&without), ports(&with)), (1, 2));
        // On the same bus, so that the other devices are where they are.
        let pci = |hardware: &Hardware| {
            let arguments = hardware.arguments(false);
            let devices = values(&arguments, "-device").into_iter();
            devices
                .filter(|device| device.contains("-pci"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(pci(&without), pci(&with));
    }

    #[test]
    fn hardware_that_was_saved_before_there_were_modules_has_none() {
        let saved = r#"{"machine":"pc-q35-7.2","accelerator":"tcg","processors":2,"memory":268435456}"#;
        let read: Hardware = serde_json::from_str(saved).unwrap();
        assert_eq!(read, hardware(Accelerator::Tcg, false));
    }
}
