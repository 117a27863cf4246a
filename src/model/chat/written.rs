//! Templates beside what Python's Jinja2 3.1.6 makes of them, set up as transformers does; and templates without end.

use super::*;

/// Templates over [`messages`] at [`now`], and what Jinja2 makes of them. minijinja has no tuples: one is printed as a list.
const RENDERED: &[(&str, &str)] = &[
    ("{{ messages }}", "[{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '{{ 1 }} <b>'}]"),
    (
        "{{ messages | tojson }}",
        r##"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ 1 }} <b>"}]"##,
    ),
    ("{{ messages[1] | tojson(indent=2) }}", "{\n  \"role\": \"user\",\n  \"content\": \"{{ 1 }} <b>\"\n}"),
    (
        r##"{{ {'b': [1, 2.0, true, none], 'a': "é\"\n"} | tojson(ensure_ascii=true, sort_keys=true) }}"##,
        r##"{"a": "\u00e9\"\n", "b": [1, 2.0, true, null]}"##,
    ),
    ("{{ {'b': [], 'a': {}} | tojson(indent=1, separators=(',', ':')) }}", "{\n \"b\":[],\n \"a\":{}\n}"),
    ("{{ '<&>' | tojson }}", r##""<&>""##),
    (
        r##"{{ ['it\'s', 'a"b', 'both\'"', 'tab\t', 'é☃', none, true, 1.5, 1e20, 1e-7, 3.0] }}"##,
        r##"["it's", 'a"b', 'both\'"', 'tab\t', 'é☃', None, True, 1.5, 1e+20, 1e-07, 3.0]"##,
    ),
    ("{% set l = [1, 'a'] %}{{ 'x' ~ l ~ none ~ 2.0 ~ undefined_thing ~ {'k': 'v'} }}", "x[1, 'a']None2.0{'k': 'v'}"),
    (
        "{{ 'a %s b %d%% %5.2f|%-4s|%04d|%r|%x' % ('x', 7, 3.14159, 'l', 42, 'q', 255) }}",
        "a x b 7%  3.14|l   |0042|'q'|ff",
    ),
    ("{{ '%s' % 'one' }}{{ '%s' % 3 }}{{ '%05d' % -42 }}", "one3-0042"),
    ("{{ '%s' % [1, 2] }}", "[1, 2]"),
    ("{{ '%s and %s' | format('a', [1]) }}", "a and [1]"),
    (
        "{{ strftime_now('%Y-%m-%d %H:%M:%S %B %b %A %a %j %d') }}",
        "2024-02-29 07:05:03 February Feb Thursday Thu 060 29",
    ),
    ("{{ 'abcdef'[1:4] }}{{ 'abc'[::-1] }}{{ [1,2,3][1:] }}", "bcdcba[2, 3]"),
    (
        "{{ [1] + [2] }}{{ 'a' + 'b' }}{{ 1 + 2 }}{{ 7 % 3 }}{% set three = 3 %}{{ 'ab' * three }}{{ [0] * three }}{{ 2 * 3.5 }}{{ -7 % 3 }}",
        "[1, 2]ab31ababab[0, 0, 0]7.02",
    ),
    (
        "{{ ['a', 'b'] | join(', ') }}{{ 'a-b' | replace('-', '+') }}{{ 'a\nb\n\nc' | indent(2) }}|{{ 'a\nb' | indent(2, true) }}",
        "a, ba+ba\n  b\n\n  c|  a\n  b",
    ),
    (
        "{{ 'a' in 'cab' }}{{ 3 in [1, 2] }}{{ 'role' in messages[0] }}{{ 'x' not in 'y' }}{{ 1 < 2 }}{{ 1 == 1.0 }}",
        "TrueFalseTrueTrueTrueTrue",
    ),
    ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}", "{{ 1 }} <b>"),
    (
        "{{ messages | map(attribute='role') | list }}{{ messages | rejectattr('role', 'eq', 'user') | list | length }}",
        "['system', 'user']1",
    ),
    (
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].keys() | list }}",
        "role=system;content=Be brief.;['role', 'content']",
    ),
    (
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') ~ m('b') }}{% set c %}q{{ m(1) }}{% endset %}{{ c | upper }}",
        "<a><b>Q<1>",
    ),
    ("{% set ns = namespace(s='') %}{% for i in range(4) %}{% set ns.s = ns.s ~ i %}{% endfor %}{{ ns.s }}", "0123"),
    (
        "{{ 'A b'.lower().split() }}{{ ' x '.strip() }}{{ 'a,b'.replace(',', ';') }}{{ ','.join(['x', 'y']) }}{{ 'ab'.startswith('a') }}",
        "['a', 'b']xa;bx,yTrue",
    ),
    ("{{ messages[0].get('none', 'default') }}{{ messages | length }}{{ messages[-1].role }}", "default2user"),
    (
        "{{ 'x' if messages is iterable and messages is not string and messages is not mapping else 'y' }}{{ 5 is odd }}{{ none is none }}",
        "xTrueTrue",
    ),
    (
        "{{ 'ab' | list }}{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}{{ [3,1,2] | sort }}{{ 'x' | string }}{{ 3 | string }}{{ 2.0 | string }}{{ true | string }}",
        "['a', 'b']a2b1[1, 2, 3]x32.0True",
    ),
    (
        "{{ 10 / 4 }}{{ 9 // 2 }}{{ 2 ** 5 }}{{ 3.7 | int }}{{ '12' | int + 1 }}{{ 1.0 }}{{ 100000.5 | round(1) }}",
        "2.54323131.0100000.5",
    ),
    (
        "{{ 'hello world' | title }}{{ 'hello' | capitalize }}{{ [1, 2] | first }}{{ [1,2] | last }}{{ 'zz' | default('d') }}{{ nope | default('d') }}",
        "Hello WorldHello12zzd",
    ),
];

fn messages() -> Vec<Message> {
    let message = |role, content: &str| Message { role, content: content.to_owned() };
    vec![message("system", "Be brief."), message("user", "{{ 1 }} <b>")]
}

/// What the templates of these tests may make: as little as lets them end soon.
const BYTES: u64 = 4 << 20;

fn now() -> DateTime<Local> {
    use chrono::TimeZone;
    Local.with_ymd_and_hms(2024, 2, 29, 7, 5, 3).unwrap()
}

fn rendered(source: &str) -> Result<String, String> {
    let template = ChatTemplate { path: "M".into(), source: source.to_owned(), tokens: BTreeMap::new() };
    template.render_at(&messages(), now(), BYTES).map_err(|fault| fault.to_string())
}

#[test]
fn values_are_written_as_jinja2_writes_them() {
    let differing: Vec<String> = RENDERED
        .iter()
        .map(|(template, expected)| (template, expected, rendered(template)))
        .filter(|(_, expected, found)| found.as_deref() != Ok(**expected))
        .map(|(template, expected, found)| format!("{template}\n  {expected:?}\n  {found:?}"))
        .collect();
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn no_template_makes_text_without_end() {
    let bytes = "it makes more than 4194304 bytes of text";
    let depth = "a value nests more than 64 deep";
    for (template, expected) in [
        ("{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", bytes),
        ("{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", bytes),
        ("{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s * 2 %}{% endfor %}", bytes),
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
            bytes,
        ),
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
            bytes,
        ),
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
            bytes,
        ),
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
            bytes,
        ),
        ("{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}", bytes),
        ("{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l * 9 %}{% endfor %}", bytes),
        (
            "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
            bytes,
        ),
        (
            "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l == ns.l }}",
            bytes,
        ),
        (
            "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ 'a' in ns.l }}",
            bytes,
        ),
        (
            "{% set s = messages[0].content * 90000 %}{% set ns = namespace(l=[]) %}{% for i in range(900) %}{% set ns.l = ns.l + [s ~ i] %}{% endfor %}",
            bytes,
        ),
        ("{% set s = messages[0].content * 90000 %}{{ ([s] * 900) | join }}", bytes),
        ("{% set s = messages[0].content * 90000 %}{{ ([s] * 900) | map('upper') | list }}", bytes),
        ("{{ messages[0].content | indent(999999999999, true) }}", bytes),
        ("{{ messages | tojson(indent=999999999999) }}", bytes),
        ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", depth),
        ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns | tojson }}", depth),
        (
            "{% set ns = namespace(l=[]) %}{% for i in range(15000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
            depth,
        ),
        ("{{ '%999999999d' % 1 }}", "`%999999999d` is not written here"),
        ("{{ 9 * 9 * 'a' * 9 * 9 * 9 }}", "it multiplies constants more than 2 times"),
        ("{{ range(*[1, 2]) }}", "*arguments"),
        ("{{ [1] | batch(999999999, 0) }}", "filter batch is unknown"),
        ("{{ '{:999999999}'.format(1) }}", "format is not a method here"),
        (
            "{% set s = range(50000) | list %}{% for i in range(99999) %}{% if -1 in s %}{% endif %}{% endfor %}",
            "it looks through more than 67108864 bytes",
        ),
        (
            "{% set s = 'x' * 4000000 %}{% for i in range(99999) %}{% if s.count('xy') %}{% endif %}{% endfor %}",
            "it looks through more than 67108864 bytes",
        ),
        (
            "{% set s = 'x' * 4000000 %}{% for i in range(99999) %}{% if s | length %}{% endif %}{% endfor %}",
            "it looks through more than 67108864 bytes",
        ),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "engine ran out of fuel"),
    ] {
        let message = rendered(template).unwrap_err();
        assert!(message.contains(expected), "{template}\n{message}");
    }
    // Macros call themselves; what a capture holds is paid for as it is printed.
    assert!(rendered("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}").is_err());
    let text = "x".repeat(200_000);
    let raw = format!(
        "{{% set ns = namespace(l=[]) %}}{{% for i in range(99999) %}}{{% set c %}}{text}{{% endset %}}{{% set ns.l = ns.l + [c] %}}{{% endfor %}}"
    );
    assert!(rendered(&raw).is_err());
}

#[test]
fn depth_is_no_end_of_the_program() {
    // Nothing writes it out, so nothing refuses it: it is dropped again.
    let text = "{% set ns = namespace(l=none) %}{% for i in range(15000) %}{% set n = namespace() %}{% set n.x = ns.l %}{% set ns.l = n %}{% endfor %}a";
    assert_eq!(rendered(text).unwrap(), "a");
    assert!(rendered(&format!("{{{{ {}1 }}}}", "1~".repeat(30_000))).is_ok_and(|text| text.len() == 30_001));
}
