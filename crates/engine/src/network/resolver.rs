//! Which resolvers the queries of boxes go to.

use std::net::{IpAddr, Ipv4Addr};

/// Where systemd-resolved, which itself listens on a loopback address, names the resolvers behind it.
const BEHIND_RESOLVED: &str = "/run/systemd/resolve/resolv.conf";

/// The configured resolvers, or the host's that are reachable from outside of its loopback.
pub(super) fn resolvers(configured: &[IpAddr]) -> Vec<Ipv4Addr> {
    let v4 = |ips: Vec<IpAddr>| -> Vec<Ipv4Addr> {
        ips.into_iter()
            .filter_map(|ip| match ip {
                IpAddr::V4(ip) if !ip.is_loopback() && !ip.is_unspecified() => Some(ip),
                _ => None,
            })
            .collect()
    };
    if !configured.is_empty() {
        return v4(configured.to_vec());
    }
    ["/etc/resolv.conf", BEHIND_RESOLVED]
        .iter()
        .filter_map(|file| std::fs::read_to_string(file).ok())
        .map(|text| v4(nameservers(&text)))
        .find(|found| !found.is_empty())
        .unwrap_or_default()
}

fn nameservers(resolv_conf: &str) -> Vec<IpAddr> {
    let server = |line: &str| line.trim().strip_prefix("nameserver")?.trim().parse().ok();
    resolv_conf.lines().filter_map(server).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nameserver_lines_are_read_and_others_passed_over() {
        let text = "# a comment\nsearch example.org\nnameserver 192.0.2.53\nnameserver\t2001:db8::53\nnameserver x\n";
        assert_eq!(
            nameservers(text),
            [
                "192.0.2.53".parse::<IpAddr>().unwrap(),
                "2001:db8::53".parse().unwrap()
            ]
        );
    }

    #[test]
    fn a_loopback_resolver_is_of_no_use_to_a_box() {
        assert!(resolvers(&["127.0.0.53".parse().unwrap()]).is_empty());
    }
}
