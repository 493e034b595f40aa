use super::*;
use crate::wire::msgpack::Value;
use proptest::prelude::*;
use std::net::Ipv4Addr;

const NOW: f64 = 1_700_000_000.0;

fn contact(number: u32) -> Contact {
    Contact { node_id: DhtId::of_bytes(&number.to_be_bytes()), peer_id: PeerId::random() }
}

fn config(number: u32) -> NodeConfig {
    let limits = StorageLimits::default();
    NodeConfig { own: contact(number), client_mode: false, workers: 4, strict: true, limits }
}

fn node() -> Node {
    Node::new(config(0))
}

fn info(contact: &Contact) -> Option<NodeInfo> {
    Some(NodeInfo { node_id: Bytes::copy_from_slice(&contact.node_id.0) })
}

fn ping(from: &Contact, validate: bool) -> DhtEvent {
    let request = DhtRequest::Ping(PingRequest { auth: None, peer: info(from), validate });
    DhtEvent::Inbound { id: InboundId(7), from: from.peer_id, net: Net::Unknown, request }
}

fn pong(from: &Contact, dht_time: f64, available: bool) -> Option<Response> {
    Some(Response::Ping(PingResponse { auth: None, peer: info(from), dht_time, available }))
}

fn only_call(actions: Vec<DhtAction>) -> (CallId, PeerId, DhtRequest) {
    match <[DhtAction; 1]>::try_from(actions) {
        Ok([DhtAction::Call { call, peer, request }]) => (call, peer, request),
        other => panic!("expected one call, got {other:?}"),
    }
}

/// The join of a node through one peer that answers the ping with `response`.
fn join_with(response: Option<Response>, peer: &Contact) -> Vec<DhtAction> {
    let mut node = node();
    let actions = node.on(DhtEvent::Join { id: OperationId(1), peers: vec![peer.peer_id] }, NOW);
    let (call, called, request) = only_call(actions);
    assert_eq!(called, peer.peer_id);
    assert!(matches!(request, DhtRequest::Ping(PingRequest { validate: true, .. })));
    node.on(DhtEvent::Answered { call, response }, NOW + 0.1)
}

/// Has a node meet a contact that calls it and answers its ping.
fn acquaint(node: &mut Node, other: &Contact) {
    let called = |action| match action {
        DhtAction::Call { call, .. } => Some(call),
        _ => None,
    };
    let actions = node.on(ping(other, false), NOW);
    let call = actions.into_iter().find_map(called).expect("a ping");
    node.on(DhtEvent::Answered { call, response: pong(other, NOW, false) }, NOW);
    assert!(node.table().contains(other));
}

#[test]
fn plain_ping_is_answered_at_once_and_its_caller_is_a_member_once_it_has_answered() {
    for (answer_of, is_member) in [(Some(1), true), (Some(2), false), (None, false)] {
        let (mut node, caller) = (node(), contact(1));
        let mut actions = node.on(ping(&caller, false), NOW);
        let expected = PingResponse {
            auth: None,
            peer: info(&node.config.own),
            dht_time: NOW,
            available: false,
        };
        let reply = actions.remove(0);
        assert!(
            matches!(&reply, DhtAction::Reply { id: InboundId(7), response: Ok(Response::Ping(r)) } if *r == expected)
        );
        let (call, peer, request) = only_call(actions);
        assert_eq!(peer, caller.peer_id);
        assert!(matches!(request, DhtRequest::Ping(PingRequest { validate: false, .. })));
        assert!(node.table().is_empty());
        let again = node.on(ping(&caller, false), NOW);
        assert_eq!(again.len(), 1, "one ping is enough: {again:?}");
        let response = answer_of.and_then(|number| pong(&contact(number), NOW, false));
        node.on(DhtEvent::Answered { call, response }, NOW);
        assert_eq!(
            (node.table().contains(&caller), node.table().len()),
            (is_member, is_member.into())
        );
        let again = node.on(ping(&caller, false), NOW + 1.0);
        assert_eq!(again.len(), 1, "a liar is left alone for a while: {again:?}");
    }
}

#[test]
fn callers_that_never_answer_draw_few_pings_and_keep_nobody_out() {
    let mut node = node();
    let mut pings = Vec::new();
    let mut call = |node: &mut Node, number: u32, net| {
        let DhtEvent::Inbound { id, from, request, .. } = ping(&contact(number), false) else {
            panic!("a call")
        };
        let actions = node.on(DhtEvent::Inbound { id, from, net, request }, NOW);
        pings.extend(actions.into_iter().filter_map(|action| match action {
            DhtAction::Call { call, .. } => Some(call),
            _ => None,
        }));
        pings.len()
    };
    let net = |number: u32| Net::V4(Ipv4Addr::from(number));
    let of_one = (1..500).map(|number| call(&mut node, number, net(0))).max();
    assert_eq!(of_one, Some(verify::MAX_VERIFYING_OF_NET));
    assert_eq!(call(&mut node, 500, net(1)), verify::MAX_VERIFYING_OF_NET + 1);
    let of_all = (501..1000).map(|number| call(&mut node, number, net(number))).max();
    assert_eq!((of_all, node.table().len()), (Some(verify::MAX_VERIFYING), 0));
    for call in pings {
        node.on(DhtEvent::Answered { call, response: None }, NOW + 3.0);
    }
    acquaint(&mut node, &contact(1000));
    assert_eq!(node.table().len(), 1);
}

#[test]
fn validated_ping_is_answered_after_a_call_back_only() {
    for (answer_of, available) in [(Some(1), true), (Some(2), false), (None, false)] {
        let (mut node, caller) = (node(), contact(1));
        let (call, peer, request) = only_call(node.on(ping(&caller, true), NOW));
        assert_eq!(peer, caller.peer_id);
        assert!(matches!(request, DhtRequest::Ping(PingRequest { validate: false, .. })));
        assert!(node.table().is_empty());
        let response = answer_of.and_then(|number| pong(&contact(number), NOW, false));
        let actions = node.on(DhtEvent::Answered { call, response }, NOW);
        let [DhtAction::Reply { response: Ok(Response::Ping(reply)), .. }] = &actions[..] else {
            panic!("{actions:?}")
        };
        assert_eq!(reply.available, available);
        assert_eq!(node.table().contains(&caller), available);
    }
}

#[test]
fn client_calls_leave_no_trace() {
    let (mut node, caller) = (node(), contact(1));
    let request = DhtRequest::Ping(PingRequest {
        auth: None,
        peer: Some(NodeInfo::default()),
        validate: true,
    });
    let actions = node.on(
        DhtEvent::Inbound { id: InboundId(1), from: caller.peer_id, net: Net::Unknown, request },
        NOW,
    );
    assert!(matches!(&actions[..], [DhtAction::Reply { .. }]));
    assert!(node.table().is_empty());
}

#[test]
fn join_fails_in_words_that_help() {
    let peer = contact(1);
    let result = |response| match join_with(response, &peer).pop() {
        Some(DhtAction::Joined { result: Err(error), .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(result(None), "no initial peer answers (1 asked)");
    assert!(result(pong(&peer, NOW, false)).contains("cannot reach this node"));
    assert!(result(pong(&peer, NOW + 3.2, true)).contains("differs from that of initial peer"));
    assert!(result(pong(&peer, NOW - 3.1, true)).contains("by -3.2 s"));
}

#[test]
fn join_looks_up_our_own_id_after_the_pings() {
    let peer = contact(1);
    for dht_time in [NOW, NOW + 3.0, NOW - 2.9, 0.0] {
        let (_, called, request) = only_call(join_with(pong(&peer, dht_time, true), &peer));
        assert_eq!(called, peer.peer_id);
        assert!(matches!(request, DhtRequest::Find(_)));
    }
}

#[test]
fn new_neighbour_receives_what_it_should_keep() {
    let (mut node, newcomer) = (node(), contact(1));
    let item = |n: u32| {
        (
            DhtId::of_bytes(&n.to_be_bytes()),
            Item::Regular(Timed { value: "v".into(), expiration: NOW + 60.0 }),
        )
    };
    let actions =
        node.on(DhtEvent::Store { id: OperationId(1), items: (0..10).map(item).collect() }, NOW);
    assert!(matches!(&actions[..], [DhtAction::Stored { accepted, .. }] if *accepted == [1; 10]));
    let actions = node.on(ping(&newcomer, false), NOW);
    let [DhtAction::Reply { .. }, DhtAction::Call { call, request: DhtRequest::Ping(_), .. }] =
        &actions[..]
    else {
        panic!("it is called back first: {actions:?}")
    };
    let response = pong(&newcomer, NOW, false);
    let actions = node.on(DhtEvent::Answered { call: *call, response }, NOW);
    let [DhtAction::Call { peer, request: DhtRequest::Store(request), .. }] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((*peer, request.keys.len()), (newcomer.peer_id, 10));
    assert!(request.in_cache.iter().all(|in_cache| !in_cache));
    assert_eq!(node.on(ping(&newcomer, false), NOW).len(), 1, "only once");
}

#[test]
fn misaligned_and_malformed_requests_are_refused() {
    let mut node = node();
    let mut refused = |request| {
        let event = DhtEvent::Inbound {
            id: InboundId(1),
            from: PeerId::random(),
            net: Net::Unknown,
            request,
        };
        let actions = node.on(event, NOW);
        matches!(&actions[..], [DhtAction::Reply { response: Err(_), .. }])
    };
    let key = Bytes::copy_from_slice(&[1; 20]);
    assert!(refused(DhtRequest::Store(StoreRequest {
        keys: vec![key.clone()],
        ..StoreRequest::default()
    })));
    let malformed = StoreRequest {
        keys: vec![key.clone()],
        subkeys: vec![Bytes::from_static(&[0xc1])],
        values: vec![Bytes::new()],
        expiration_time: vec![NOW + 1.0],
        in_cache: vec![false],
        ..StoreRequest::default()
    };
    assert!(refused(DhtRequest::Store(malformed)));
    assert!(refused(DhtRequest::Find(FindRequest {
        keys: vec![Bytes::from_static(b"short")],
        ..FindRequest::default()
    })));
    assert!(refused(DhtRequest::Find(FindRequest {
        keys: vec![key; 257],
        ..FindRequest::default()
    })));
}

#[test]
fn cache_makes_room_and_is_read_when_it_is_newer() {
    let limits = StorageLimits { max_keys: 2, ..StorageLimits::default() };
    let mut node = Node::new(NodeConfig { limits, ..config(0) });
    let from = PeerId::random();
    let mut store = |n: u8, expiration: f64, in_cache: bool| {
        let request = StoreRequest {
            keys: vec![DhtId::of_bytes(&[n]).0.to_vec().into()],
            subkeys: vec![Value::Nil.encode().into()],
            values: vec![vec![n].into()],
            expiration_time: vec![expiration],
            in_cache: vec![in_cache],
            ..StoreRequest::default()
        };
        let request = DhtRequest::Store(request);
        let event = DhtEvent::Inbound { id: InboundId(1), from, net: Net::Unknown, request };
        let actions = node.on(event, NOW);
        match &actions[..] {
            [DhtAction::Reply { response: Ok(Response::Store(response)), .. }] => {
                response.store_ok[0]
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(store(1, NOW + 9.0, true) && store(2, NOW + 5.0, true) && store(3, NOW + 7.0, true));
    assert!(store(1, NOW + 8.0, false));
    let mut find = |n: u8| {
        let event =
            DhtEvent::Get { id: OperationId(1), keys: vec![DhtId::of_bytes(&[n])], latest: true };
        match node.on(event, NOW).pop() {
            Some(DhtAction::Found { mut found, .. }) => {
                found.remove(0).1.map(|stored| stored.expiration())
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((find(1), find(2), find(3)), (Some(NOW + 9.0), None, Some(NOW + 7.0)));
}

/// Pings with ever new node ids from one connection: the store is sent once, to an id that answers.
#[test]
fn made_up_node_ids_draw_nothing() {
    let mut node = node();
    let value = |n: u32| Timed { value: vec![n as u8; 8000].into(), expiration: NOW + 60.0 };
    let item = |n: u32| (DhtId::of_bytes(&n.to_be_bytes()), Item::Regular(value(n)));
    node.on(DhtEvent::Store { id: OperationId(1), items: (0..500).map(item).collect() }, NOW);
    let peer_id = PeerId::random();
    let mut calls = Vec::new();
    for n in 1..16 {
        let claimed = Contact { peer_id, ..contact(n) };
        let actions = node.on(ping(&claimed, false), NOW);
        calls.extend(actions.into_iter().filter(|action| matches!(action, DhtAction::Call { .. })));
    }
    let (call, _, request) = only_call(calls);
    assert!(matches!(request, DhtRequest::Ping(_)));
    let response = pong(&Contact { peer_id, ..contact(99) }, NOW, false);
    let actions = node.on(DhtEvent::Answered { call, response }, NOW);
    let stored = |action: &&DhtAction| {
        matches!(action, DhtAction::Call { request: DhtRequest::Store(_), .. })
    };
    assert_eq!(actions.iter().filter(stored).count(), 0, "another id than it claimed");
}

#[test]
fn welcomes_stay_within_their_bytes() {
    let mut node = node();
    let value = || Timed { value: vec![7; 60_000].into(), expiration: NOW + 60.0 };
    let item = |n: u32| (DhtId::of_bytes(&n.to_be_bytes()), Item::Regular(value()));
    node.on(DhtEvent::Store { id: OperationId(1), items: (0..500).map(item).collect() }, NOW);
    let mut bytes = 0;
    for n in 1..60 {
        let newcomer = contact(n);
        let mut actions = node.on(ping(&newcomer, false), NOW);
        while let Some(action) = actions.pop() {
            match action {
                DhtAction::Call { call, peer, request: DhtRequest::Ping(_) }
                    if peer == newcomer.peer_id =>
                {
                    let response = pong(&newcomer, NOW, false);
                    actions.extend(node.on(DhtEvent::Answered { call, response }, NOW));
                }
                DhtAction::Call { request: DhtRequest::Store(request), .. } => {
                    bytes += request.values.iter().map(Bytes::len).sum::<usize>();
                }
                _ => {}
            }
        }
    }
    println!("59 newcomers drew {bytes} bytes of 30,000,000 each");
    assert!((1_000_000..=16 << 20).contains(&bytes), "{bytes}");
}

/// A node that believes the last writer holds a forged record of ours that ends in 29 days.
#[test]
fn refused_renewal_is_answered_by_a_newer_one() {
    let (mut node, holder) = (node(), contact(1));
    acquaint(&mut node, &holder);
    let own = crate::dht::storage::tag_of(&node.config.own.peer_id);
    let key = DhtId::of_text("model.0");
    let item = Item::Entry(own.clone(), Timed { value: "true".into(), expiration: NOW + 240.0 });
    let event = DhtEvent::Store { id: OperationId(1), items: vec![(key, item)] };
    let (call, ..) = only_call(node.on(event, NOW));
    let found = |found: Option<Dictionary>| {
        let mut result = FindResult::default();
        if let Some(found) = found {
            result.set_type(ResultType::FoundDictionary);
            (result.value, result.expiration_time) = (found.encode(), NOW + 1.0);
        }
        Some(Response::Find(FindResponse { auth: None, results: vec![result], peer: None }))
    };
    let stored = |ok: bool| {
        Some(Response::Store(StoreResponse { auth: None, store_ok: vec![ok], peer: None }))
    };
    let (call, _, request) =
        only_call(node.on(DhtEvent::Answered { call, response: found(None) }, NOW));
    assert!(matches!(request, DhtRequest::Store(_)));
    let (call, _, request) =
        only_call(node.on(DhtEvent::Answered { call, response: stored(false) }, NOW));
    assert!(matches!(request, DhtRequest::Find(_)), "{request:?}");
    let end = NOW + 29.0 * 86_400.0;
    let forged = Dictionary::single(own, Timed { value: "forged".into(), expiration: end }, None);
    let event = DhtEvent::Answered { call, response: found(Some(forged)) };
    let (call, peer, request) = only_call(node.on(event, NOW));
    let DhtRequest::Store(request) = request else { panic!("{request:?}") };
    assert_eq!((peer, &request.values[0][..]), (holder.peer_id, &b"true"[..]));
    assert_eq!(request.expiration_time, [end + 1.0]);
    let actions = node.on(DhtEvent::Answered { call, response: stored(true) }, NOW);
    assert!(
        matches!(&actions[..], [DhtAction::Stored { accepted, .. }] if *accepted == [2]),
        "{actions:?}"
    );
    assert_eq!(node.refused_renewals(), 1);
}

/// Two records of ours travel at the same time: the older one arrives last, and gives way.
#[test]
fn an_older_record_of_ours_never_replaces_a_newer_one() {
    let own_key = DhtId::of_text("model.0");
    for newer_starts_before_the_question in [true, false] {
        let (mut node, holder) = (node(), contact(1));
        acquaint(&mut node, &holder);
        let own = crate::dht::storage::tag_of(&node.config.own.peer_id);
        let entry = |value: &'static str, end: f64| {
            (own_key, Item::Entry(own.clone(), Timed { value: value.into(), expiration: end }))
        };
        let nothing = |keys| {
            let results = vec![FindResult::default(); keys];
            Some(Response::Find(FindResponse { auth: None, results, peer: None }))
        };
        let stored = |ok: bool| {
            Some(Response::Store(StoreResponse { auth: None, store_ok: vec![ok], peer: None }))
        };
        let joining = vec![entry("joining", NOW + 100.0)];
        let (call, ..) =
            only_call(node.on(DhtEvent::Store { id: OperationId(1), items: joining }, NOW));
        let (first, _, request) =
            only_call(node.on(DhtEvent::Answered { call, response: nothing(1) }, NOW));
        assert!(matches!(request, DhtRequest::Store(_)));
        let offline = vec![entry("offline", NOW + 101.0)];
        let later = DhtEvent::Store { id: OperationId(2), items: offline };
        let first = match newer_starts_before_the_question {
            true => {
                node.on(later, NOW);
                node.on(DhtEvent::Answered { call: first, response: stored(false) }, NOW)
            }
            false => {
                let asked =
                    node.on(DhtEvent::Answered { call: first, response: stored(false) }, NOW);
                let (question, _, request) = only_call(asked);
                assert!(matches!(request, DhtRequest::Find(_)), "{request:?}");
                node.on(later, NOW);
                let mut result = FindResult::default();
                result.set_type(ResultType::FoundDictionary);
                let timed = Timed { value: "offline".into(), expiration: NOW + 101.0 };
                let newer = Dictionary::single(own.clone(), timed, None);
                (result.value, result.expiration_time) = (newer.encode(), NOW + 101.0);
                let results = vec![result];
                let found = Some(Response::Find(FindResponse { auth: None, results, peer: None }));
                node.on(DhtEvent::Answered { call: question, response: found }, NOW)
            }
        };
        let again = first.iter().any(|action| matches!(action, DhtAction::Call { .. }));
        assert!(!again, "{first:?}");
        let ended = matches!(&first[..], [DhtAction::Stored { id: OperationId(1), .. }]);
        assert!(ended, "{first:?}");
    }
}

proptest! {
    #[test]
    fn no_request_from_the_wire_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0u8..3) {
        use prost::Message;
        let request = match kind {
            0 => PingRequest::decode(&bytes[..]).map(DhtRequest::Ping),
            1 => StoreRequest::decode(&bytes[..]).map(DhtRequest::Store),
            _ => FindRequest::decode(&bytes[..]).map(DhtRequest::Find),
        };
        if let Ok(request) = request {
            node().on(DhtEvent::Inbound { id: InboundId(1), from: PeerId::random(), net: Net::Unknown, request }, NOW);
        }
    }

    #[test]
    fn no_answer_from_the_wire_panics(value in prop::collection::vec(any::<u8>(), 0..80), kind in -1i32..4, id in prop::collection::vec(any::<u8>(), 0..40)) {
        let (mut node, peer) = (node(), contact(1));
        acquaint(&mut node, &peer);
        let keys = vec![DhtId::of_text("k")];
        let (call, ..) = only_call(node.on(DhtEvent::Get { id: OperationId(1), keys, latest: true }, NOW));
        let result = FindResult {
            r#type: kind,
            value: value.into(),
            expiration_time: f64::NAN,
            nearest_node_ids: vec![id.clone().into(), vec![3; 20].into()],
            nearest_peer_ids: vec![id.into()],
        };
        let response = FindResponse { auth: None, results: vec![result], peer: None };
        node.on(DhtEvent::Answered { call, response: Some(Response::Find(response)) }, NOW);
    }
}
