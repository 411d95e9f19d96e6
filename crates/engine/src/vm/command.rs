//! The command line of a machine.

use serde::{Deserialize, Serialize};

use super::qemu::Accelerator;
use crate::launch::machine::{DISK, INITRD, KERNEL, MEMORY, TAP_FD};

/// Abstract sockets in the network namespace of a machine's process, where nobody else is.
pub(crate) const GUEST_SOCKET: &str = "dorm-guest";
pub(crate) const MONITOR_SOCKET: &str = "dorm-monitor";

/// What a machine is made of. Its state can be loaded only by one that is made alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hardware {
    /// QEMU's name of the machine, with a version: newer ones of QEMU have it, too.
    pub(crate) machine: String,
    pub(crate) accelerator: Accelerator,
    pub(crate) processors: u32,
    /// Bytes.
    pub(crate) memory: u64,
}

impl Hardware {
    /// The processor that the machine sees: named feature by feature, as neither the host's nor the version of QEMU
    /// may decide it if a state is to move. It is what distributions call x86-64-v2, and more for cryptography.
    fn processor(&self) -> &'static str {
        match self.accelerator {
            Accelerator::Tcg => "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+aes,+pclmulqdq,+rdrand",
        }
    }

    /// With `waiting`, the machine waits for a state to be loaded.
    pub(crate) fn arguments(&self, waiting: bool) -> Vec<String> {
        let accelerator = match self.accelerator {
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
        add("cpu", self.processor().to_owned());
        add("smp", self.processors.to_string());
        add("m", format!("{megabytes}M"));
        add(
            "object",
            format!("memory-backend-file,id=ram,mem-path={MEMORY},size={megabytes}M,share=on"),
        );
        add("kernel", KERNEL.to_owned());
        add("initrd", INITRD.to_owned());
        // A panic ends the machine, and with it the box.
        add("append", "console=ttyS0 quiet panic=-1 no_timer_check".to_owned());
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
        add("device", "virtio-balloon-pci,free-page-reporting=on".to_owned());
        add("chardev", socket("monitor", MONITOR_SOCKET));
        add("mon", "chardev=monitor,mode=control".to_owned());
        if waiting {
            add("incoming", "defer".to_owned());
        }
        arguments
    }
}
