//! Text for a shell.

use std::path::Path;

/// A word as a POSIX shell takes it: as it is where that is safe, else in single quotes.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "@%+=:,./_-".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else if word.contains(char::is_control) {
        // A terminal would obey it; bash, ksh and zsh read this form, and POSIX has it since 2024.
        let byte = |byte: &u8| match byte {
            b'\'' | b'\\' => format!("\\{}", *byte as char),
            0x20..0x7f => (*byte as char).to_string(),
            byte => format!("\\{byte:03o}"),
        };
        format!("$'{}'", word.as_bytes().iter().map(byte).collect::<String>())
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A path as a word; one that begins with a dash is no flag.
pub fn quoted_path(path: &Path) -> String {
    let text = path.to_string_lossy();
    if text.starts_with('-') { quoted(&format!("./{text}")) } else { quoted(&text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_read_them() {
        let cases =
            [("a/b-1.json", "a/b-1.json"), ("a b", "'a b'"), ("it's", r"'it'\''s'"), ("", "''"), ("$x*", "'$x*'")];
        for (word, text) in cases {
            assert_eq!(quoted(word), text);
        }
        assert_eq!(quoted("a\u{1b}[2J'\n"), r"$'a\033[2J\'\012'");
        assert_eq!(quoted_path(Path::new("-q")), "./-q");
    }
}
