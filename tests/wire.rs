//! Compares the definitions in `protos/` and `nri/protos/` with those that they stand for.
//!
//! Whatever is in ours must be in upstream's, the same: packages, services, methods, messages,
//! fields, enums, and their values. Upstream's are read from where these variables say:
//! `REPRISE_UPSTREAM_NRI` and `REPRISE_UPSTREAM_CRI` (each an `api.proto`), and
//! `REPRISE_UPSTREAM_CONTAINERD` (the directory of containerd's `api` module).

use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use protox::file::{File, FileResolver, GoogleFileResolver};
use protox::prost_reflect::prost_types::{
    DescriptorProto, EnumDescriptorProto, FileDescriptorProto,
};
use protox::prost_reflect::{
    DescriptorPool, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, ServiceDescriptor,
};

#[test]
#[ignore = "needs the upstream definitions, see `make test`"]
fn ours_are_upstreams() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut ours = Vec::new();
    for directory in ["protos", "nri/protos"] {
        let files = files_below(&root.join(directory));
        assert!(!files.is_empty(), "{directory}");
        ours.extend(files);
    }
    let packages: BTreeSet<String> = ours.iter().map(package).collect();
    let upstream = upstream_files();
    let counterparts: Vec<String> = upstream
        .iter()
        .filter(|file| packages.contains(&package(file)))
        .map(|file| file.name.clone())
        .collect();

    let differences = differences(&compile(ours), &compile_of(&counterparts, upstream));
    assert!(
        differences.is_empty(),
        "not as upstream has it:\n{}",
        differences.join("\n")
    );
}

#[test]
fn whatever_differs_is_found() {
    const UPSTREAM: &str = r#"
        syntax = "proto3";
        package p;
        import "github.com/gogo/protobuf/gogoproto/gogo.proto";
        option (gogoproto.equal_all) = true;
        service S { rpc Get(M) returns (stream M); }
        message M {
            int32 number = 1 [(gogoproto.customname) = "Number"];
            repeated string list = 2;
            oneof choice { M a = 3; bool b = 4; }
            optional bool maybe = 5;
            map<string, int64> map = 6;
            E kind = 7;
        }
        enum E { ZERO = 0; ONE = 1; }
    "#;
    let same = UPSTREAM
        .replace("number = 1", "number = 1 /* ours */")
        .replace("ONE = 1;", "");
    assert_eq!(compare(&same, UPSTREAM), [""; 0]);

    for (upstreams, ours, difference) in [
        ("package p;", "package q;", "q.M: upstream has none"),
        ("Get(M)", "Got(M)", "p.S.Got: upstream has none"),
        ("returns (stream M)", "returns (M)", "p.S.Get: (p.M) -> p.M"),
        ("service S", "service T", "p.T: upstream has none"),
        ("number = 1", "number = 8", "p.M.number: singular int32 = 8"),
        (
            "int32 number",
            "int64 number",
            "p.M.number: singular int64 = 1",
        ),
        (
            "int32 number",
            "int32 amount",
            "p.M.amount: upstream has none",
        ),
        (
            "repeated string list",
            "string list",
            "p.M.list: singular string = 2",
        ),
        (
            "oneof choice",
            "oneof either",
            "p.M.a: singular p.M = 3 in either",
        ),
        (
            "optional bool maybe",
            "bool maybe",
            "p.M.maybe: singular bool = 5",
        ),
        (
            "int64> map",
            "int32> map",
            "p.M.MapEntry.value: singular int32 = 2",
        ),
        ("ONE = 1", "ONE = 2", "p.E.ONE: 2"),
        ("ONE = 1", "TWO = 1", "p.E.TWO: upstream has none"),
    ] {
        let found = compare(&UPSTREAM.replace(upstreams, ours), UPSTREAM);
        assert!(
            found.iter().any(|found| found.starts_with(difference)),
            "{ours}: found {found:?}"
        );
    }
}

fn compare(ours: &str, upstream: &str) -> Vec<String> {
    let source = |text: &str| {
        vec![Source {
            name: "test.proto".into(),
            text: text.into(),
        }]
    };
    differences(&compile(source(ours)), &compile(source(upstream)))
}

// --- Comparing ---

fn differences(ours: &DescriptorPool, upstream: &DescriptorPool) -> Vec<String> {
    let mut found = Vec::new();
    for service in ours.services() {
        let theirs = upstream.get_service_by_name(service.full_name());
        compare_parts(
            &mut found,
            service.full_name(),
            methods(&service),
            theirs.as_ref().map(methods),
        );
    }
    for message in ours
        .all_messages()
        .filter(|message| !is_google(message.full_name()))
    {
        let theirs = upstream.get_message_by_name(message.full_name());
        compare_parts(
            &mut found,
            message.full_name(),
            fields(&message),
            theirs.as_ref().map(fields),
        );
    }
    for kind in ours.all_enums().filter(|kind| !is_google(kind.full_name())) {
        let theirs = upstream.get_enum_by_name(kind.full_name());
        compare_parts(
            &mut found,
            kind.full_name(),
            values(&kind),
            theirs.as_ref().map(values),
        );
    }
    found
}

/// A named part and all that must be the same of it.
type Part = (String, String);

fn compare_parts(
    found: &mut Vec<String>,
    whole: &str,
    ours: Vec<Part>,
    upstream: Option<Vec<Part>>,
) {
    let Some(upstream) = upstream else {
        found.push(format!("{whole}: upstream has none"));
        return;
    };
    for (name, ours) in ours {
        match upstream.iter().find(|(theirs, _)| *theirs == name) {
            None => found.push(format!("{whole}.{name}: upstream has none")),
            Some((_, theirs)) if *theirs != ours => {
                found.push(format!("{whole}.{name}: {ours}, upstream {theirs}"));
            }
            Some(_) => {}
        }
    }
}

fn methods(service: &ServiceDescriptor) -> Vec<Part> {
    let stream = |streams| if streams { "stream " } else { "" };
    service
        .methods()
        .map(|method| {
            let (input, output) = (method.input(), method.output());
            let all = format!(
                "({}{}) -> {}{}",
                stream(method.is_client_streaming()),
                input.full_name(),
                stream(method.is_server_streaming()),
                output.full_name()
            );
            (method.name().into(), all)
        })
        .collect()
}

fn fields(message: &MessageDescriptor) -> Vec<Part> {
    message
        .fields()
        .map(|field| (field.name().into(), describe(&field)))
        .collect()
}

fn describe(field: &FieldDescriptor) -> String {
    let label = match (
        field.is_list() || field.is_map(),
        field.field_descriptor_proto().proto3_optional(),
    ) {
        (true, _) => "repeated",
        (false, true) => "optional",
        (false, false) => "singular",
    };
    let kind = match field.kind() {
        Kind::Message(message) => message.full_name().to_string(),
        Kind::Enum(kind) => kind.full_name().to_string(),
        scalar => format!("{scalar:?}"),
    };
    let mut all = format!("{label} {kind} = {}", field.number());
    if let Some(oneof) = field.containing_oneof() {
        write!(all, " in {}", oneof.name()).unwrap();
    }
    all
}

fn values(kind: &EnumDescriptor) -> Vec<Part> {
    kind.values()
        .map(|value| (value.name().into(), value.number().to_string()))
        .collect()
}

fn is_google(name: &str) -> bool {
    name.starts_with("google.protobuf.")
}

// --- Reading ---

struct Source {
    /// As other files import it.
    name: String,
    text: String,
}

fn files_below(root: &Path) -> Vec<Source> {
    let mut files = Vec::new();
    let mut directories = vec![root.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path
                .extension()
                .is_some_and(|extension| extension == "proto")
            {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().into();
                files.push(Source {
                    name,
                    text: fs::read_to_string(&path).unwrap(),
                });
            }
        }
    }
    files
}

fn upstream_files() -> Vec<Source> {
    let path = |variable| {
        PathBuf::from(env::var_os(variable).unwrap_or_else(|| panic!("{variable} is not set")))
    };
    let mut files = Vec::new();
    for variable in ["REPRISE_UPSTREAM_NRI", "REPRISE_UPSTREAM_CRI"] {
        let text = fs::read_to_string(path(variable)).unwrap();
        files.push(Source {
            name: format!("{variable}.proto"),
            text,
        });
    }
    files.extend(files_below(&path("REPRISE_UPSTREAM_CONTAINERD")));
    files
}

fn package(file: &Source) -> String {
    parse(file).package().into()
}

/// The file without its options: they do not reach the wire, and upstream's need definitions that
/// are of no use here.
fn parse(file: &Source) -> FileDescriptorProto {
    let parsed = File::from_source(&file.name, &file.text);
    let parsed = parsed.unwrap_or_else(|error| panic!("{}: {error:?}", file.name));
    let mut parsed = parsed.file_descriptor_proto().clone();
    // Imports that others see through this file are given by position. None are in use.
    assert!(parsed.public_dependency.is_empty() && parsed.weak_dependency.is_empty());
    parsed
        .dependency
        .retain(|import| !import.ends_with("gogo.proto"));
    for import in &mut parsed.dependency {
        // Before its release 1.11, containerd's API imports its own files by their public path.
        if let Some(own) = import.strip_prefix("github.com/containerd/containerd/api/") {
            *import = own.into();
        }
    }
    parsed.options = None;
    parsed.extension.clear();
    parsed.message_type.iter_mut().for_each(strip_message);
    parsed.enum_type.iter_mut().for_each(strip_enum);
    for service in &mut parsed.service {
        service.options = None;
        service
            .method
            .iter_mut()
            .for_each(|method| method.options = None);
    }
    parsed
}

fn strip_message(message: &mut DescriptorProto) {
    // What remains is what the parser found out itself: which messages are the entries of maps.
    if let Some(options) = &mut message.options {
        options.uninterpreted_option.clear();
    }
    message
        .field
        .iter_mut()
        .for_each(|field| field.options = None);
    message
        .oneof_decl
        .iter_mut()
        .for_each(|oneof| oneof.options = None);
    message.enum_type.iter_mut().for_each(strip_enum);
    message.nested_type.iter_mut().for_each(strip_message);
}

fn strip_enum(kind: &mut EnumDescriptorProto) {
    kind.options = None;
    kind.value.iter_mut().for_each(|value| value.options = None);
}

fn compile(files: Vec<Source>) -> DescriptorPool {
    let names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
    compile_of(&names, files)
}

/// Compiles the files with these names, and whatever they import of the others.
fn compile_of(names: &[String], files: Vec<Source>) -> DescriptorPool {
    let mut compiler = protox::Compiler::with_file_resolver(Sources(files));
    compiler.include_imports(true);
    for name in names {
        compiler
            .open_file(name)
            .unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
    compiler.descriptor_pool()
}

struct Sources(Vec<Source>);

impl FileResolver for Sources {
    fn resolve_path(&self, path: &Path) -> Option<String> {
        path.to_str().map(Into::into)
    }

    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        match self.0.iter().find(|file| file.name == name) {
            Some(file) => Ok(File::from_file_descriptor_proto(parse(file))),
            None => GoogleFileResolver::new().open_file(name),
        }
    }
}
