package idempotency_test

import (
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// registryWithImports returns a registry of what a file imports, for building a
// changed copy of the file beside the one that is linked in.
func registryWithImports(t *testing.T, file protoreflect.FileDescriptor) *protoregistry.Files {
	t.Helper()
	files := &protoregistry.Files{}
	var add func(protoreflect.FileDescriptor)
	add = func(fd protoreflect.FileDescriptor) {
		imports := fd.Imports()
		for i := range imports.Len() {
			dep := imports.Get(i).FileDescriptor
			if _, err := files.FindFileByPath(dep.Path()); err == nil {
				continue
			}
			add(dep)
			if err := files.RegisterFile(dep); err != nil {
				t.Fatal(err)
			}
		}
	}
	add(file)
	return files
}
