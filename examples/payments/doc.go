// Command payments is a small service to copy: a keyed Charge whose record,
// effect and outgoing event are one transaction, a client that survives its own
// death, and what a person on call needs.
//
//	payments serve                          SQLite, in a file here
//	payments serve -db postgres://…         PostgreSQL
//	payments charge -account alice -cents 500 -order o-1
//	payments find KEY                       what became of the call with this key?
//	payments open                           what nobody knows the end of, the oldest first
//	payments resolve ID free                … and what to do with it
//
// Read, in this order: proto/belay/payments/v1/payments.proto (what may be
// repeated), service.go (the handler), server.go (two lines of Belay and a
// store), client.go (a key that is saved before it is sent), desk.go (on call).
package main
