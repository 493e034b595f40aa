//! The messages of a conversation, checked, as chat templates read them.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::error::ApiError;
use crate::template::conversation::{field, with_field};

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 4096;

/// The messages for a template: contents are single texts, arguments of tool calls are objects, and all else
/// (names, ids) is as it was.
///
/// # Errors
/// None or too many of them, or one that is no message.
pub fn readable(messages: &[Value]) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() || messages.len() > MAX_MESSAGES {
        return Err(bad(format!("{} messages: expected 1 to {MAX_MESSAGES}", messages.len())));
    }
    messages.iter().map(message).collect()
}

fn bad(text: String) -> ApiError {
    ApiError::bad(text, Some("messages"))
}

fn message(message: &Value) -> Result<Value, ApiError> {
    let role = field(message, "role");
    if role.as_ref().and_then(Value::as_str).is_none() {
        return Err(bad("a message needs a role, which is a text".to_owned()));
    }
    let content = content(&field(message, "content").unwrap_or_default())?;
    let calls = field(message, "tool_calls").map(|calls| tool_calls(&calls));
    let changed = [("content", Some(content)), ("tool_calls", calls)];
    Ok(changed.into_iter().fold(message.clone(), |message, (key, value)| match value {
        Some(value) => with_field(&message, key, value),
        None => message,
    }))
}

/// A text, or parts of which each is a text.
fn content(content: &Value) -> Result<Value, ApiError> {
    match content.kind() {
        ValueKind::Undefined | ValueKind::None => Ok(Value::from(())),
        ValueKind::String => Ok(content.clone()),
        ValueKind::Seq => {
            let parts = content.try_iter().into_iter().flatten();
            parts.map(|part| text(&part)).collect::<Result<String, _>>().map(Value::from)
        }
        other => Err(bad(format!("a content is a {other}: expected a text or a list of parts"))),
    }
}

fn text(part: &Value) -> Result<String, ApiError> {
    let kind = field(part, "type");
    let kind = kind.as_ref().and_then(Value::as_str).unwrap_or_default();
    match field(part, "text").as_ref().and_then(Value::as_str) {
        Some(text) if kind == "text" => Ok(text.to_owned()),
        _ => Err(bad(format!("a content part of type {kind:.40?} is not supported: only text is"))),
    }
}

/// Calls whose arguments are objects, where the text of one stood, as in OpenAI's API: templates write the
/// arguments with `tojson` (vllm `entrypoints/chat_utils.py`, `_postprocess_messages`).
fn tool_calls(calls: &Value) -> Value {
    if calls.kind() != ValueKind::Seq {
        return calls.clone();
    }
    let call = |call: Value| {
        let function = field(&call, "function")?;
        let text = field(&function, "arguments")?;
        let arguments: Value = serde_json::from_str(text.as_str()?).ok()?;
        let is_object = arguments.kind() == ValueKind::Map;
        is_object
            .then(|| with_field(&call, "function", with_field(&function, "arguments", arguments)))
    };
    let calls = calls.try_iter().into_iter().flatten();
    calls.map(|one| call(one.clone()).unwrap_or(one)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: &str) -> Result<String, String> {
        let messages: Vec<Value> = serde_json::from_str(json).unwrap();
        let read =
            readable(&messages).map_err(|error| error.body()["error"]["message"].to_string())?;
        Ok(serde_json::to_string(&read).unwrap())
    }

    #[test]
    fn contents_are_texts_and_the_order_of_keys_stays() {
        let json = r#"[{"role":"user","name":"b","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"a":1}]"#;
        let expected = r#"[{"role":"user","name":"b","content":"ab","a":1}]"#;
        assert_eq!(of(json).unwrap(), expected);
        assert_eq!(of(r#"[{"role":"user"}]"#).unwrap(), r#"[{"role":"user","content":null}]"#);
    }

    #[test]
    fn arguments_of_calls_are_objects() {
        let call = |arguments: &str| {
            format!(
                r#"[{{"role":"assistant","content":null,"tool_calls":[{{"id":"1","function":{{"name":"f","arguments":{arguments}}},"type":"function"}}]}}]"#
            )
        };
        assert_eq!(of(&call(r#""{\"z\": 1, \"a\": []}""#)).unwrap(), call(r#"{"z":1,"a":[]}"#));
        for same in [r#""no JSON""#, r#""7""#, r#"{"z":1}"#, "7"] {
            assert_eq!(of(&call(same)).unwrap(), call(same));
        }
        assert_eq!(
            of(r#"[{"role":"a","tool_calls":7}]"#).unwrap(),
            r#"[{"role":"a","tool_calls":7,"content":null}]"#
        );
    }

    #[test]
    fn what_is_no_message_is_named() {
        for (json, part) in [
            ("[]", "0 messages"),
            ("[7]", "needs a role"),
            (r#"[{"content":"x"}]"#, "needs a role"),
            (r#"[{"role":7}]"#, "needs a role"),
            (r#"[{"role":"user","content":7}]"#, "is a number"),
            (r#"[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]"#, "image_url"),
            (r#"[{"role":"user","content":["x"]}]"#, "only text is"),
        ] {
            let error = of(json).unwrap_err();
            assert!(error.contains(part), "{json}: {error}");
        }
        let many = format!("[{}]", vec![r#"{"role":"user"}"#; MAX_MESSAGES + 1].join(","));
        assert!(of(&many).unwrap_err().contains("4097 messages"));
    }
}
