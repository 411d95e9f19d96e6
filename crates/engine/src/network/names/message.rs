//! As much of DNS messages as is needed to know what was asked and which addresses were given. Whatever does not fit is
//! no message.

use std::net::Ipv4Addr;

const HEADER: usize = 12;
const A: u16 = 1;
const CNAME: u16 = 5;
const INTERNET: u16 = 1;
const REFUSED: u8 = 5;
pub(super) const SERVER_FAILURE: u8 = 2;

/// The one question of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Question {
    /// In lower case, without a dot at its end.
    pub(super) name: String,
    kind: u16,
    class: u16,
    /// Where it ends in the message.
    end: usize,
}

/// The question of a query, if it is one.
pub(super) fn question(message: &[u8]) -> Option<Question> {
    let is_query = message.get(2)? & 0xf8 == 0;
    let question = read_question(message)?;
    is_query.then_some(question)
}

/// Whether `reply` answers this question.
pub(super) fn answers(reply: &[u8], question: &Question) -> bool {
    let is_reply = reply.get(2).is_some_and(|flags| flags & 0x80 != 0);
    is_reply && read_question(reply).is_some_and(|found| found == *question)
}

fn read_question(message: &[u8]) -> Option<Question> {
    if number(message, 4)? != 1 {
        return None;
    }
    let (name, end) = name(message, HEADER)?;
    Some(Question {
        name,
        kind: number(message, end)?,
        class: number(message, end + 2)?,
        end: end + 4,
    })
}

/// A reply that says no more than this code.
pub(super) fn failure(query: &[u8], question: Option<&Question>, code: u8) -> Option<Vec<u8>> {
    let end = question.map_or(HEADER, |question| question.end);
    let mut reply = query.get(..end)?.to_vec();
    reply[2] = 0x80 | query[2] & 0x79;
    reply[3] = 0x80 | code;
    reply[4..HEADER].fill(0);
    reply[5] = u8::from(question.is_some());
    Some(reply)
}

pub(super) fn refusal(query: &[u8], question: &Question) -> Option<Vec<u8>> {
    failure(query, Some(question), REFUSED)
}

struct Record {
    owner: String,
    seconds: u32,
    data: Data,
}

enum Data {
    Address(Ipv4Addr),
    Alias(String),
}

/// The addresses that a reply gives to the name that was asked for, and for how many seconds each holds. Aliases are
/// followed; records of other names say nothing.
pub(super) fn addresses(reply: &[u8], question: &Question) -> Vec<(Ipv4Addr, u32)> {
    let records = records(reply, question).unwrap_or_default();
    let mut names = vec![question.name.as_str()];
    let mut at = 0;
    while let Some(name) = names.get(at).copied() {
        for record in records.iter().filter(|record| record.owner == name) {
            if let Data::Alias(target) = &record.data
                && !names.contains(&target.as_str())
            {
                names.push(target);
            }
        }
        at += 1;
    }
    let given = records.iter().filter_map(|record| match record.data {
        Data::Address(address) if names.contains(&record.owner.as_str()) => Some((address, record.seconds)),
        _ => None,
    });
    given.collect()
}

fn records(reply: &[u8], question: &Question) -> Option<Vec<Record>> {
    let mut at = question.end;
    let mut records = Vec::new();
    for _ in 0..number(reply, 6)? {
        let (owner, fixed) = name(reply, at)?;
        let length = usize::from(number(reply, fixed + 8)?);
        let data = fixed + 10;
        at = data + length;
        let content = reply.get(data..at)?;
        if number(reply, fixed + 2)? != INTERNET {
            continue;
        }
        let data = match (number(reply, fixed)?, content) {
            (A, &[a, b, c, d]) => Data::Address(Ipv4Addr::new(a, b, c, d)),
            (CNAME, _) => Data::Alias(name(reply, data)?.0),
            _ => continue,
        };
        let seconds = u32::from(number(reply, fixed + 4)?) << 16 | u32::from(number(reply, fixed + 6)?);
        records.push(Record { owner, seconds, data });
    }
    Some(records)
}

fn number(message: &[u8], at: usize) -> Option<u16> {
    let bytes = message.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

/// The name at a place in a message, and where it ends there. Pointers lead backwards only, so that it does end.
fn name(message: &[u8], start: usize) -> Option<(String, usize)> {
    let (mut text, mut at, mut limit, mut end) = (String::new(), start, start, None);
    loop {
        let length = usize::from(*message.get(at)?);
        match length {
            0 => return Some((text, end.unwrap_or(at + 1))),
            1..=63 => {
                let label = message.get(at + 1..at + 1 + length)?;
                if !text.is_empty() {
                    text.push('.');
                }
                // A dot or a strange byte within a label must not look like a name that it is not.
                let plain = label
                    .iter()
                    .all(|b| b.is_ascii_alphanumeric() || *b == b'-' || *b == b'_');
                if !plain || text.len() + length > 253 {
                    return None;
                }
                text.extend(label.iter().map(|b| char::from(b.to_ascii_lowercase())));
                at += 1 + length;
            }
            0xc0.. => {
                let target = usize::from(number(message, at)? & 0x3fff);
                end = end.or(Some(at + 2));
                if target >= limit {
                    return None;
                }
                (at, limit) = (target, target);
            }
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(name: &str) -> Vec<u8> {
        let labels = name
            .split('.')
            .flat_map(|label| std::iter::once(label.len() as u8).chain(label.bytes()));
        labels.chain([0]).collect()
    }

    fn query(name: &str) -> Vec<u8> {
        [
            &[1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0][..],
            &encoded(name),
            &[0, 1, 0, 1],
        ]
        .concat()
    }

    fn record(owner: &[u8], kind: u8, ttl: u8, data: &[u8]) -> Vec<u8> {
        [owner, &[0, kind, 0, 1, 0, 0, 0, ttl, 0, data.len() as u8], data].concat()
    }

    fn reply(name: &str, records: &[Vec<u8>]) -> Vec<u8> {
        let mut message = query(name);
        message[2] = 0x81;
        message[7] = records.len() as u8;
        message.extend(records.concat());
        message
    }

    const SAME: &[u8] = &[0xc0, 12];

    #[test]
    fn a_question_is_read_in_lower_case() {
        let question = question(&query("API.Example.org")).unwrap();
        assert_eq!(question.name, "api.example.org");
        assert!(answers(&reply("api.example.ORG", &[]), &question));
        assert!(!answers(&reply("other.example.org", &[]), &question));
        assert!(
            !answers(&query("api.example.org"), &question),
            "a query is no answer"
        );
    }

    #[test]
    fn addresses_of_the_name_and_its_aliases_are_taken_and_others_are_not() {
        let records = [
            record(&encoded("edge.cdn.example"), 1, 30, &[198, 51, 100, 1]),
            record(SAME, 5, 60, &encoded("edge.cdn.example")),
            record(&encoded("bank.example"), 1, 60, &[203, 0, 113, 9]),
            record(SAME, 28, 60, &[0; 16]),
        ];
        let question = question(&query("a.example")).unwrap();
        let found = addresses(&reply("a.example", &records), &question);
        assert_eq!(found, [(Ipv4Addr::new(198, 51, 100, 1), 30)]);
    }

    #[test]
    fn aliases_that_lead_in_a_circle_end() {
        let circle = [
            record(SAME, 5, 60, &encoded("b.example")),
            record(&encoded("b.example"), 5, 60, &encoded("a.example")),
        ];
        let question = question(&query("a.example")).unwrap();
        assert!(addresses(&reply("a.example", &circle), &question).is_empty());
    }

    #[test]
    fn a_pointer_to_itself_or_ahead_is_no_name() {
        let mut message = vec![0; HEADER];
        message.extend([0xc0, 12]);
        assert_eq!(name(&message, HEADER), None);
        message.splice(12.., [1, b'a', 0xc0, 16, 1, b'b', 0]);
        assert_eq!(name(&message, HEADER), None);
    }

    #[test]
    fn a_dot_within_a_label_is_no_name() {
        let mut message = vec![0; HEADER];
        message.extend([3, b'a', b'.', b'b', 0]);
        assert_eq!(name(&message, HEADER), None);
    }

    #[test]
    fn a_refusal_carries_the_question() {
        let query = query("a.example");
        let refused = refusal(&query, &question(&query).unwrap()).unwrap();
        assert_eq!(refused[..2], query[..2]);
        assert_eq!(refused[3] & 0xf, REFUSED);
        assert!(answers(&refused, &question(&query).unwrap()));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_fail(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            if let Some(question) = question(&bytes) {
                refusal(&bytes, &question).unwrap();
                addresses(&bytes, &question);
            }
            if let Some(question) = read_question(&bytes) {
                addresses(&bytes, &question);
            }
        }
    }
}
