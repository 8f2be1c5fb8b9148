"""The accuracy page: every committed measurement beside its target."""
