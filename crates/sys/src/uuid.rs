//! UUIDs as people and the kernel write them.

pub fn text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_uuid_has_five_parts() {
        let bytes = std::array::from_fn(|i| i as u8);
        assert_eq!(super::text(bytes), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
