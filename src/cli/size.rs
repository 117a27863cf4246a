//! Sizes on the command line and in text.

/// Units, each 1024 times the one before.
const UNITS: [char; 4] = ['K', 'M', 'G', 'T'];

/// Parses `512M`: a whole number with K, M, G or T (1024 each), or without.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let with = |(unit, power): (char, u32)| {
        let digits = text.strip_suffix([unit, unit.to_ascii_lowercase()])?;
        Some((digits, 1024_u64.pow(power)))
    };
    let (digits, factor) = UNITS.into_iter().zip(1..).find_map(with).unwrap_or((text, 1));
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err("expected a whole number with K, M, G or T (1024)".to_owned());
    }
    let number = digits.parse().ok().and_then(|number: u64| number.checked_mul(factor));
    number.ok_or_else(|| "it is too large: the largest size is 2^64 - 1 bytes".to_owned())
}

/// `12,345,678`
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `419.3 GB`: decimal units, as disks and repositories are measured.
pub(crate) fn human(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 1000.0 || unit == "GB" {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1000.0;
    }
    unreachable!("GB takes every value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        assert_eq!(parse("12"), Ok(12));
        assert_eq!(parse("3K"), Ok(3072));
        assert_eq!(parse("2g"), Ok(2 << 30));
        assert_eq!((parse("5M"), parse("3T"), parse("1t")), (Ok(5 << 20), Ok(3 << 40), Ok(1 << 40)));
        assert_eq!(parse("16777215T"), Ok(((1 << 24) - 1) << 40));
        assert!(parse("1.5G").is_err() && parse("G").is_err() && parse("-1").is_err());
        assert!(parse("1P").is_err() && parse("1GT").is_err() && parse("T").unwrap_err().contains("K, M, G or T"));
        assert!(parse("+1").is_err() && parse("").is_err() && parse("1 G").is_err());
        assert_eq!(parse("18446744073709551615"), Ok(u64::MAX));
        for text in ["99999999999G", "16777216T", "18446744073709551616", "99999999999999999999999K"] {
            assert!(parse(text).unwrap_err().contains("too large"), "{text}");
        }
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(human(999), "999 B");
        assert_eq!(human(419_300_000_000), "419.3 GB");
    }
}
