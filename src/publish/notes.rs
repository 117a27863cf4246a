//! Words of a user's within a model card: whether what follows them is still Markdown.

/// Whether a text leaves a code fence or a comment open, which would take what follows for its own.
///
/// Fences are those of CommonMark 0.31, §4.5: three or more of one character, indented by three spaces at most; one closes
/// with at least as many and nothing behind them.
pub fn is_open(text: &str) -> bool {
    let mut fence: Option<(char, usize)> = None;
    let mut prose = String::new();
    for line in text.lines() {
        let bare = line.trim_start_matches(' ');
        let marker = (line.len() - bare.len() <= 3).then(|| marker(bare)).flatten();
        match (fence, marker) {
            (None, Some(((mark, count), info))) if mark == '~' || !info.contains('`') => fence = Some((mark, count)),
            (None, _) => prose.extend([line, "\n"]),
            (Some((mark, least)), Some(((found, count), ""))) if found == mark && count >= least => fence = None,
            (Some(_), _) => {}
        }
    }
    let open_comment = prose.rfind("<!--").is_some_and(|begin| !prose[begin..].contains("-->"));
    fence.is_some() || open_comment
}

/// The character and the length of a fence that a line begins with, and what stands behind it.
fn marker(line: &str) -> Option<((char, usize), &str)> {
    let mark = line.chars().next().filter(|c| "`~".contains(*c))?;
    let behind = line.trim_start_matches(mark);
    let count = line.len() - behind.len();
    (count >= 3).then(|| ((mark, count), behind.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_open_is_noticed() {
        for text in [
            "```",
            "a\n```sh\nb",
            "~~~~\n~~~",
            "```\n~~~",
            "```\n```x",
            "a <!-- b",
            "```\na\n```\n```",
            "   ```\n    ```",
        ] {
            assert!(is_open(text), "{text}");
        }
        for text in [
            "",
            "words",
            "```\n<!--\n```",
            "```sh\na\n```",
            "~~~\n```\n~~~~",
            "    ```",
            "a ``` b",
            "<!-- a -->",
            "```x```",
            "```\r\na\r\n```\r\n",
        ] {
            assert!(!is_open(text), "{text}");
        }
    }
}
