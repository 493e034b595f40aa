//! Messages as a template reads them: roles that it knows, and the mark behind a message that goes on.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::TemplateError;

/// Stands behind the text of a message that goes on (transformers `utils/chat_template_utils.py`). The space tells
/// whether the template keeps those at the end of a text.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// What an object has under `key`.
pub fn field(object: &Value, key: &str) -> Option<Value> {
    if object.kind() != ValueKind::Map {
        return None;
    }
    object.get_attr(key).ok().filter(|value| !value.is_undefined())
}

/// The same object with another value under `key`, which keeps its place.
pub fn with_field(object: &Value, key: &str, value: Value) -> Value {
    let keys = || object.try_iter().into_iter().flatten();
    let is_new = !keys().any(|other| other.as_str() == Some(key));
    let old = keys().map(|other| match other.as_str() == Some(key) {
        true => (other, value.clone()),
        false => (other.clone(), object.get_item(&other).unwrap_or_default()),
    });
    let new = is_new.then(|| (Value::from(key), value.clone()));
    Value::from_pairs(old.chain(new))
}

/// The messages with the role `system` for `developer`, unless the template `source` names that role.
pub fn known_roles(messages: Vec<Value>, source: &str) -> Vec<Value> {
    if source.contains("developer") {
        return messages;
    }
    let is_developer = |message: &Value| {
        field(message, "role").is_some_and(|role| role.as_str() == Some("developer"))
    };
    let renamed = |message: Value| match is_developer(&message) {
        true => with_field(&message, "role", Value::from("system")),
        false => message,
    };
    messages.into_iter().map(renamed).collect()
}

/// The text of the last message, and the messages with the mark behind it.
///
/// # Errors
/// There is no text to go on with.
pub fn marked(mut messages: Vec<Value>) -> Result<(String, Vec<Value>), TemplateError> {
    let last = messages.pop().unwrap_or_default();
    let content = field(&last, "content");
    let text = content.as_ref().and_then(Value::as_str).filter(|text| !text.is_empty());
    let text = text.ok_or_else(|| {
        let reason = "continue_final_message needs a last message with a text to go on with";
        TemplateError::Render(reason.to_owned())
    })?;
    messages.push(with_field(&last, "content", Value::from(format!("{text}{MARK}"))));
    Ok((text.to_owned(), messages))
}

/// A prompt up to the mark, where the last message goes on.
///
/// # Errors
/// The template left out the last message, whose text is `last`, or a part of it.
pub fn up_to_mark(mut prompt: String, last: &str) -> Result<String, TemplateError> {
    let at = prompt.rfind(MARK.trim_end()).filter(|_| prompt.contains(last.trim()));
    let at = at.ok_or_else(|| {
        let reason = "it leaves out text of the last message, which cannot go on then";
        TemplateError::Render(reason.to_owned())
    })?;
    let keeps_spaces = prompt.get(at..).is_some_and(|rest| rest.starts_with(MARK));
    prompt.truncate(at);
    if !keeps_spaces {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(prompt)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(json: &str) -> Vec<Value> {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_developer_is_a_system_unless_the_template_knows_the_role() {
        let both = r#"[{"role":"developer","content":"a"},{"role":"user","content":"developer"}]"#;
        let roles = |source: &str| -> Vec<String> {
            let known = known_roles(messages(both), source);
            known.iter().map(|message| field(message, "role").unwrap().to_string()).collect()
        };
        assert_eq!(roles("{{ messages }}"), ["system", "user"]);
        assert_eq!(roles("{% if message.role == 'developer' %}"), ["developer", "user"]);
    }

    #[test]
    fn a_prompt_ends_where_its_last_message_goes_on() {
        let (text, marked) =
            marked(messages(r#"[{"role":"assistant","content":"It is "}]"#)).unwrap();
        let content = field(&marked[0], "content").unwrap().to_string();
        assert_eq!(text, "It is ");
        assert_eq!(up_to_mark(format!("<a>{content}</a>\n"), &text).unwrap(), "<a>It is ");
        // As a template that trims.
        assert_eq!(up_to_mark(format!("<a>{}</a>\n", content.trim()), &text).unwrap(), "<a>It is");
        assert!(up_to_mark("<a></a>".to_owned(), &text).is_err());
    }

    #[test]
    fn a_last_message_without_text_cannot_go_on() {
        for none in
            ["[]", r#"[{"role":"assistant","content":null}]"#, r#"[{"role":"user","content":""}]"#]
        {
            assert!(marked(messages(none)).is_err(), "{none}");
        }
    }
}
