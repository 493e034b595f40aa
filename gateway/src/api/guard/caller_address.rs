//! Who called, behind proxies: `X-Forwarded-For` is believed from proxies that the operator names.

use std::net::{IpAddr, SocketAddr};

use axum::http::HeaderMap;
use ipnet::IpNet;

const FORWARDED_FOR: &str = "x-forwarded-for";

/// The address of the caller. Each proxy adds the address that it was called from at the end of the
/// header, so the last address that is no trusted proxy's is the caller's; what stands before it, anybody
/// may have written.
pub fn caller(headers: &HeaderMap, peer: IpAddr, trusted: &[IpNet]) -> IpAddr {
    let is_trusted = |ip: IpAddr| trusted.iter().any(|net| net.contains(&ip));
    let lines = headers.get_all(FORWARDED_FOR).iter().rev();
    let lines: Vec<_> = lines.map(|line| String::from_utf8_lossy(line.as_bytes())).collect();
    let mut hops = lines.iter().flat_map(|line| line.rsplit(','));
    let mut caller = peer.to_canonical();
    while is_trusted(caller) {
        match hops.next().and_then(address) {
            Some(before) => caller = before,
            None => break,
        }
    }
    caller
}

/// Some proxies write a port, too.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let with_port = || text.parse().ok().map(|address: SocketAddr| address.ip());
    bare.parse().ok().or_else(with_port).map(|ip: IpAddr| ip.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn found(peer: &str, lines: &[&[u8]], trusted: &[&str]) -> String {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(FORWARDED_FOR, HeaderValue::from_bytes(line).unwrap());
        }
        let nets: Vec<IpNet> = trusted.iter().map(|net| net.parse().unwrap()).collect();
        caller(&headers, peer.parse().unwrap(), &nets).to_string()
    }

    #[test]
    fn the_header_is_believed_from_trusted_proxies_alone() {
        assert_eq!(found("10.0.0.1", &[b"1.2.3.4"], &[]), "10.0.0.1");
        assert_eq!(found("10.0.0.1", &[b"1.2.3.4"], &["10.0.0.2/32"]), "10.0.0.1");
        assert_eq!(found("10.0.0.1", &[b"1.2.3.4"], &["10.0.0.0/8"]), "1.2.3.4");
        assert_eq!(found("10.0.0.1", &[], &["10.0.0.0/8"]), "10.0.0.1");
        assert_eq!(found("::ffff:10.0.0.1", &[b"1.2.3.4"], &["10.0.0.1/32"]), "1.2.3.4");
    }

    #[test]
    fn the_last_address_that_is_no_proxy_counts_and_what_callers_invent_does_not() {
        let trusted = ["10.0.0.0/8", "fd00::/8"];
        assert_eq!(found("10.0.0.1", &[b"9.9.9.9, 1.2.3.4, 10.7.0.1"], &trusted), "1.2.3.4");
        assert_eq!(found("10.0.0.1", &[b"9.9.9.9", b"1.2.3.4"], &trusted), "1.2.3.4");
        assert_eq!(found("10.0.0.1", &[b"\xff\xfe, 1.2.3.4"], &trusted), "1.2.3.4");
        assert_eq!(found("10.0.0.1", &[b"1.2.3.4, unknown"], &trusted), "10.0.0.1");
        assert_eq!(found("10.0.0.1", &[b"10.0.0.3, 10.0.0.2"], &trusted), "10.0.0.3");
    }

    #[test]
    fn addresses_of_both_kinds_are_read_with_and_without_a_port() {
        for (text, ip) in [
            ("1.2.3.4:55", "1.2.3.4"),
            ("2001:db8::1", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:443", "2001:db8::1"),
            ("::ffff:1.2.3.4", "1.2.3.4"),
        ] {
            assert_eq!(found("10.0.0.1", &[text.as_bytes()], &["10.0.0.1/32"]), ip);
        }
    }
}
